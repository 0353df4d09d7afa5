"""Commands of shell scripts, which are read and not run."""

import pytest

from autoshard.core.errors import FormatError
from autoshard.formats.imports.shell_commands import shell_commands


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a --x=1 'b c' \"d e\" # note", [["a", "--x=1", "b c", "d e"]]),
        ("a \\\n  --x \\\n  --y=1\nb", [["a", "--x", "--y=1"], ["b"]]),
        ("a\n  --pasted 1\n--more", [["a", "--pasted", "1", "--more"]]),
        ("a > out 2>&1 | b; c >> out && d 2> err < in", [["a"], ["b"], ["c"], ["d"]]),
        ("N=3; a --x=$N --y=${N}00 \"$N x\" '$N'", [["a", "--x=3", "--y=300", "3 x", "$N"]]),
        ("run='python a.py'\n$run --x", [["python", "a.py", "--x"]]),
        ('c="a $1 > log"\neval $c', [["a", "$1"]]),
        ('x="--a="1\\\n" --b="2\nrun $x', [["run", "--a=1", "--b=2"]]),
        ("x=1; x+=23; a $x", [["a", "123"]]),
        (
            "export G=64 W=8\na $((G / W)) $((G/(W*2)+1)) $((G/0)) ${D:-7} ${G:-7}",
            [["a", "8", "5", "$((G/0))", "7", "64"]],
        ),
        ("E=5 a $E", [["E=5", "a", "$E"]]),
        ("if [ $1 ]; then n=1; else n=2; fi\na $n", [["[", "$1", "]"], ["a", "$n"]]),
        ("if [ $1 ]; then n=1; m=4; else n=1; fi; a $n $m", [["[", "$1", "]"], ["a", "1", "4"]]),
        ("n=1\nif b; then n=2; a $n; fi\na $n", [["b"], ["a", "2"], ["a", "$n"]]),
        ("n=1\nif b; then n=2; elif c; then n=2; fi\na $n ${n:-5}", [["b"], ["c"], ["a", "$n", "${n:-5}"]]),
        ("n=1\nif b; then n=2; elif c; then n=2; else n=2; fi\na $n", [["b"], ["c"], ["a", "2"]]),
        ("else; fi; esac; if b; else; else; fi; a", [["b"], ["a"]]),
        ("case $x in p) n=2;; q) n=2;; esac; a $n", [["q"], ["a", "2"]]),
        ("case $x in\n p) n=1;;\n *) n=2;;\nesac\na $n", [["p"], ["*"], ["a", "$n"]]),
        ("N=4; docker run image bash -lc \"cd /d && a --x=$N 'b c'\" > log", [["cd", "/d"], ["a", "--x=4", "b c"]]),
        ("n=9\nfor n in 1 2; do a $n; done", [["a", "$n"]]),
        ("n=$(seq 3); m=`date`; a $n $m $(pwd)", [["a", "$n", "$m", "$(pwd)"]]),
        ("A=( --x 1 # note\n  --y=2\n 'b c' )\na \"${A[@]}\" d", [["a", "--x", "1", "--y=2", "b c", "d"]]),
        ("A=(b 'c d'); a ${A[@]} \"${A[*]}\" x${A[@]}y $A", [["a", "b", "c", "d", "b c d", "xb", "c", "dy", "b"]]),
        ('A=(); a "${A[@]}" b; A+=(c d); A+=($E); a "${A[@]}"', [["a", "b"], ["a", "c", "d", "$E"]]),
        ('declare -a A=(b $E); B=("${A[@]}" d); C="${B[@]}"; a $C', [["a", "b", "$E", "d"]]),
        ('E=(W=8 P=2); env "${E[@]}" a X="${E[@]}" b', [["env", "W=8", "P=2", "a", "X=W=8", "P=2", "b"]]),
        ('E=(W=8 P=2); export "${E[@]}"; F=("${E[@]}" Q=3); a $W "${F[@]}"', [["a", "8", "W=8", "P=2", "Q=3"]]),
        ('if b; then A=(1); else A=(2); fi; a "${A[@]}"; (c d)', [["b"], ["a", "${A[@]}"], ["c", "d"]]),
        ('a "--x=1 \\\n--y=2" "\\$N \\\\\\"" b\\\n  c', [["a", "--x=1 --y=2", '$N \\"', "b", "c"]]),
        ('N=3; c="a \\\n --x \\$N"\n$c; eval $c', [["a", "--x", "$N"], ["a", "--x", "3"]]),
        ("a ${1:-2048} ${2-x} ${3} $4", [["a", "2048", "x", "${3}", "$4"]]),
    ],
)
def test_commands_have_the_words_that_a_shell_gives_them(text, commands):
    assert shell_commands(text) == commands


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 'open", "no closing quotation"),
        ('a "open', "no closing quotation"),
        ("a=(b c\nd", "no closing parenthesis"),
        ("a=xxxxxxxxxx\n" + "a=$a$a\n" * 40, "must have at most 1,000,000 characters"),
    ],
)
def test_text_that_is_no_script_is_refused(text, message):
    with pytest.raises(FormatError, match=message):
        shell_commands(text)


def test_a_script_that_starts_itself_ends():
    assert shell_commands("c='eval $c'\neval $c") == [["eval", "eval", "$c"]]
