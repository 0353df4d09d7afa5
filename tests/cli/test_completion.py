"""Shells complete the names of tables, topologies and planners; colours are left out where NO_COLOR is set."""

import pytest

from autoshard.cli import main


@pytest.mark.parametrize(
    ("typed", "place", "expected"),
    [
        ("autoshard plan nvidia-", 2, ["nvidia-medium", "nvidia-small", "nvidia-tiny"]),
        ("autoshard plan t --topology a100-", 4, ["a100-32", "a100-8"]),
        ("autoshard plan t --planner neo", 4, ["neo"]),
        ("autoshard simulate t --topology zionex,h100", 4, ["zionex,h100-8"]),
        ("autoshard compare t --planners auto,cp", 4, ["auto,cp-sat"]),
        ("autoshard compare t --planners nobody", 4, []),
        ("autoshard sh", 1, ["show"]),
    ],
)
def test_names_are_completed(typed, place, expected, monkeypatch, capsys):
    monkeypatch.setenv("_AUTOSHARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(place))
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize("is_coloured", [True, False])
def test_no_color_leaves_colours_out(is_coloured, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not is_coloured:
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["plan", "criteo-kaggle", "--topology", "cpu-4", "--planner", "size-greedy"]) == 0
    assert ("\x1b[34m" in capsys.readouterr().out) is is_coloured
