"""Commands of a shell script, with quotes, continued lines and variables resolved; nothing is run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

from autoshard.core.errors import FormatError

#: Variables by name; None for one whose value depends on a condition, a loop or a program. An array is a text with
#: `_BETWEEN` before each word.
_Variables = dict[str, str | None]
_BETWEEN: Final = "\0"

_EXPANSION = r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\{[^{}]*\}|\$(?:[A-Za-z_]\w*|[0-9@*#?$!])"
#: What a shell replaces between double quotes.
_IN_QUOTES: Final = re.compile(rf"\\(?P<escaped>\r?\n|[$`\"\\])|{_EXPANSION}")
#: A line that starts with an option continues the one before, as in commands that were pasted.
_TOKENS: Final = re.compile(
    rf"""(?P<joint>\\\r?\n)
    |(?P<blank>[ \t\r]+|\n(?=[ \t]*--?[A-Za-z]))
    |(?P<comment>(?<![^\s;&|()])\#[^\n]*)
    |(?P<redirection>(?:(?<!\S)[0-9]+)?(?:&>>?|>>?&?|<+&?)[ \t]*[0-9-]?)
    |(?P<end>\n|;;|;|&&|\|\||\|&?|&|[()])
    |'(?P<single>[^']*)'
    |"(?P<double>(?:\\.|[^"\\])*)"
    |(?P<expansion>{_EXPANSION})
    |(?P<output>\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)
    |\\(?P<escaped>.)
    |(?P<plain>[^\s;&|()<>'"$`\\]+|\$)
    |(?P<odd>.)""",
    re.VERBOSE | re.DOTALL,
)
_NAMED: Final = re.compile(
    r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>\w+)(?:\[(?P<words>[@*])\])?(?::?[-=](?P<default>[^}]*))?\})"
)
#: What an array's words in parentheses follow.
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_ASSIGNMENT: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_KEYWORDS: Final = frozenset(re.findall(r"\S+", "if then elif else fi case esac while until do done { } ! time"))
_DECLARATIONS: Final = ("export", "declare", "local", "readonly")
#: Characters that a script may grow to, and scripts in scripts (`eval`).
_MAX_CHARACTERS, _MAX_DEPTH = 1_000_000, 8
_OPERATIONS: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def shell_commands(text: str) -> list[list[str]]:
    """Words of each command of a script, in order.

    Variables that the script sets are replaced by their values. Those that it does not set, or sets to different
    values in the branches of a condition, stay as they are written (`$NAME`), and so do the outputs of programs. Loops
    and functions count once.

    Raises:
        FormatError: If a quote is not closed, or the text grows without end.
    """
    script = _Script()
    script.read(text, 0)
    return script.commands


class _Script:
    """What a script has set and started so far."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self._variables: _Variables = {}
        #: Of each condition around: the variables before it, and those that it may leave, by the branches so far.
        self._conditions: list[tuple[_Variables, list[_Variables]]] = []
        self._num_characters = 0

    def read(self, text: str, depth: int) -> None:
        """Reads a text, which `eval` has taken from `depth` others."""
        words: list[str] = []
        word: str | None = None
        names_file = False
        #: Whether the word begins with NAME= as the text has it: what follows is its value, be it of several words.
        is_setting = False
        #: The name of an array that is open, with its =, and the words of the command before it.
        array: tuple[str, list[str]] | None = None
        for token in _TOKENS.finditer(text + "\n"):
            kind, found = str(token.lastgroup), token[token.lastgroup or 0]
            if kind == "odd":
                raise FormatError("is no command line: no closing quotation")
            if (kind, found) == ("end", "(") and word is not None and _ARRAY.fullmatch(word):
                array, words, word = (word, words), [], None
                continue
            if kind in ("blank", "comment", "redirection", "end"):
                if word is not None and not names_file:
                    words += [word] if is_setting else _apart(word)
                names_file = found[-1] not in "0123456789-" if kind == "redirection" else names_file and word is None
                word = None
                if array is not None:
                    if (kind, found) == ("end", ")"):
                        word, words, array = f"{array[0]}{_BETWEEN}{_BETWEEN.join(words)}", array[1], None
                        is_setting = True
                elif kind == "end":
                    self._finish(words, depth)
                    self._branch(found)
                    words, names_file = [], False
                continue
            value = "" if kind == "joint" else self._value(kind, found)
            self._num_characters += len(value)
            if self._num_characters > _MAX_CHARACTERS:
                raise FormatError(f"must have at most {_MAX_CHARACTERS:,} characters with its variables replaced")
            if word is None:
                is_setting = kind == "plain" and _ASSIGNMENT.match(value) is not None
            is_split = kind == "expansion" and value != found and not is_setting
            first, *others = re.split(r"\s+", value) if is_split else [value]
            word = (word or "") + first if first or not (is_split or kind == "joint") else word
            for other in others:
                words += _apart(word) if word else []
                word = other or None
        if array is not None:
            raise FormatError("is no command line: no closing parenthesis")

    def _value(self, kind: str, found: str) -> str:
        if kind == "expansion":
            return self._expanded(found)
        if kind == "double":
            return _IN_QUOTES.sub(self._replaced, found)
        return found

    def _replaced(self, found: re.Match[str]) -> str:
        """What an escaped character or a variable between double quotes stands for."""
        return self._expanded(found[0]) if found["escaped"] is None else found["escaped"].strip("\r\n")

    def _expanded(self, reference: str) -> str:
        """The value of `$NAME`, `${NAME:-default}`, `${NAME[@]}` or `$((sum))`; what is not known stays as it is."""
        if reference.startswith("$(("):
            result = self._calculated(reference[3:-2])
            return reference if result is None else str(result)
        named = _NAMED.fullmatch(reference)
        if named is None:
            return reference
        name = named["name"] or named["braced"]
        value = self._variables.get(name, "" if named["default"] is not None else None)
        if value in ("", _BETWEEN) and named["default"] is not None:
            return self._value("double", named["default"].strip("\"'"))
        if value is None or not value.startswith(_BETWEEN):
            return reference if value is None else value
        if named["words"] == "@":
            return value[1:] or value
        words = value[1:].split(_BETWEEN)
        return " ".join(words) if named["words"] else words[0]

    def _calculated(self, formula: str) -> int | None:
        replaced = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: self._variables.get(name[1]) or name[0], formula)
        try:
            return _sum(ast.parse(replaced.strip(), mode="eval").body)
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return None

    def _finish(self, words: list[str], depth: int) -> None:
        """Takes in a command, or what stands in a command's place."""
        while words and words[0] in _KEYWORDS:
            keyword, *words = words
            self._branch(keyword)
            if keyword == "case":
                words = []
        if words[:1] == ["for"]:
            self._variables |= dict.fromkeys(words[1:2])
            return
        is_declaration = bool(words) and words[0] in _DECLARATIONS
        declared = [one for one in words[1:] if not one.startswith("-")] if is_declaration else words
        settings = [one for one in map(_ASSIGNMENT.fullmatch, declared) if one]
        if declared and len(settings) == len(declared):
            for setting in settings:
                self._set(**setting.groupdict())
        elif words[:1] == ["eval"] and depth < _MAX_DEPTH:
            self.read(" ".join(words[1:]), depth + 1)
        elif (inner := _inner_script(words)) and depth < _MAX_DEPTH:
            self.read(inner, depth + 1)
        elif words:
            self.commands.append([part for word in words for part in _apart(word)])

    def _set(self, name: str, more: str, value: str) -> None:
        before = self._variables.get(name, "") if more else ""
        is_array = value.startswith(_BETWEEN)
        unknown = before is None or (not is_array and ("$(" in value or "`" in value))
        joined = value if is_array else value.replace(_BETWEEN, " ")
        self._variables[name] = None if unknown else f"{before}{joined}"

    def _branch(self, keyword: str) -> None:
        """Starts or ends a condition or one of its branches."""
        if keyword in ("if", "case"):
            before = dict(self._variables)
            self._conditions.append((before, [before]))
        elif keyword in ("elif", "else", ";;") and self._conditions:
            before, outcomes = self._conditions[-1]
            if keyword == "else" and before in outcomes:
                outcomes.remove(before)
            outcomes.append(self._variables)
            self._variables = dict(before)
        elif keyword in ("fi", "esac") and self._conditions:
            _, outcomes = self._conditions.pop()
            self._variables = _merged([*outcomes, self._variables])


def _apart(word: str) -> list[str]:
    """The words that a word is: several or none where it holds an array's."""
    return [part for part in word.split(_BETWEEN) if part] if _BETWEEN in word else [word]


def _inner_script(words: list[str]) -> str | None:
    """The script of `bash -c SCRIPT`, in a container or on another machine too."""
    for shell, option, script in zip(words, words[1:], words[2:], strict=False):
        if shell.rpartition("/")[2] in ("bash", "sh", "zsh") and re.fullmatch("-[a-z]*c", option):
            return script
    return None


def _merged(branches: list[_Variables]) -> _Variables:
    """Variables after a condition: those that all branches which set them agree on."""
    found: _Variables = {}
    for name in dict.fromkeys(name for branch in branches for name in branch):
        values = {branch[name] for branch in branches if name in branch}
        found[name] = values.pop() if len(values) == 1 else None
    return found


def _sum(node: ast.expr) -> int:
    """A sum of whole numbers.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_sum(node.left), _sum(node.right))
    raise ValueError
