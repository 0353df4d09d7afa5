"""Options: numbers are refused by the option that took them, and what would be ignored is refused by its name."""

import re

import pytest

from autoshard.cli import main

#: What each command cannot be without; none of it is looked at before the options are.
NEEDED = {
    "import": ["nothing", "-o", "nothing.json"],
    "collect": ["--store", "nothing"],
    "samples": ["nothing"],
    "train cost": ["--store", "nothing"],
    "train step": [],
    "train policy": [],
    "plan": ["nothing", "--topology", "nothing"],
    "compare": ["nothing", "--topology", "nothing", "--planners", "random"],
    "simulate": ["nothing"],
    "run": ["nothing"],
    "serve": ["--host", "256.256.256.256"],
}


@pytest.fixture
def refused(capfd, tmp_path, monkeypatch):
    """Runs a command that must be refused; returns its only line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capfd.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    return run


@pytest.mark.parametrize("command", NEEDED)
def test_every_number_is_checked_by_its_option_as_the_help_says(command, refused, capfd):
    assert main([*command.split(), "--help"]) == 0
    text = capfd.readouterr().out
    options = re.findall(
        r"^  (?:-\w, )?(--[\w-]+) (<(?:float|int).*?>|N  )(.*?)(?=^  -)", text, re.MULTILINE | re.DOTALL
    )
    assert options
    for name, kind, rest in options:
        least = re.search(r"x>=(\d+)|(\d+)<=x<=", " ".join(rest.split()))
        values = [int(least[1] or least[2]) - 1] if least else ["0", "inf", "-inf"]
        assert least or "above 0" in kind
        for value in ("x", "nan", *values):
            assert f"'{name}'" in refused(*command.split(), *NEEDED[command], name, value), (name, value)


SEEDED = ("import", "collect", "train cost", "train step", "train policy", "plan", "compare", "simulate", "run")


@pytest.mark.parametrize("command", SEEDED)
@pytest.mark.parametrize("seed", ["1" * 25, 2**32, -1, "1.5"])
def test_seeds_have_one_range(command, seed, refused):
    assert "'--seed': " in refused(*command.split(), *NEEDED[command], "--seed", seed)


def test_seeds_of_import_formats_have_it_too(refused):
    line = refused("import", "nothing.json", "--format", "tbe-data-config", "-o", "x.json", "--set", f"seed={2**32}")
    assert "options.seed: must be a whole number in [0, 4294967295], got 4294967296" in line


@pytest.mark.parametrize(
    ("command", "options", "needed"),
    [
        ("import", ["--seed", "1"], "--num-tables"),
        ("collect", ["--ray-address", "local"], "--ray"),
        ("collect", ["--workers", "2"], "--ray"),
        ("collect", ["--nproc", "4"], "--kinds collectives"),
        ("collect", ["--node-size", "4"], "--kinds collectives"),
        ("collect", ["--strategies", "random", "--kinds", "dense"], "--kinds kernels"),
        ("collect", ["--max-tables", "3", "--kinds", "dense"], "--kinds kernels"),
        ("collect", ["--memory-gib", "3", "--kinds", "dense"], "--kinds kernels"),
        ("samples", ["--tables", "metasyn"], "--html or --image"),
        ("samples", ["--scale", "2", "--html", "x.html"], "--tables"),
        ("train cost", ["--alias", "candidate", "--no-publish"], "--publish"),
        ("train policy", ["--alias", "candidate", "--no-publish"], "--publish"),
        ("train step", ["--nproc", "3", "--store", "nothing"], "--calibrate"),
        ("train step", ["--seed", "3", "--store", "nothing"], "--calibrate"),
        ("train policy", ["--ray-address", "auto"], "--ray"),
        ("train policy", ["--measured-share", "0.5"], "--reward mixed"),
        ("plan", ["--device", "cpu"], "--replay-refine"),
        ("compare", ["--device", "cpu"], "--replay or --replay-refine"),
        ("simulate", ["--sync-every", "2"], "--groups or --group-size"),
        ("simulate", ["--layout", "within_nodes"], "--groups or --group-size"),
        ("simulate", ["--lengths", "poisson", "--batches", "0"], "--batches above 0"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(command, options, needed, refused):
    assert refused(*command.split(), *NEEDED[command], *options) == f"error: {options[0]}: needs {needed}\n"


def test_an_alias_is_for_what_changes_it(refused):
    assert refused("models", "list", "--alias", "candidate") == "error: --alias: needs promote or roll-back\n"


def test_a_calibration_has_a_fewest_number_of_runs(refused):
    assert "--calibrate: must be 0, or at least 4, got 3" in refused("train", "step", "--calibrate", "3")


@pytest.mark.parametrize(
    "command",
    [
        *("plan", "compare", "import", "export", "simulate", "collect", "samples", "init", "detect"),
        *("train cost", "train policy", "train step", "calibrate"),
    ],
)
def test_what_is_written_goes_where_the_same_option_says(command, capfd):
    assert main([*command.split(), "--help"]) == 0
    assert re.search(r"^  -o, .*--output\b|^ +--output, -o\b", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["detect", "--ranks", "9" * 25], "'--ranks'"),
        (["detect", "--nodes", "9" * 25], "'--nodes'"),
        (["detect", "--ranks", "1000", "--nodes", "1000"], "--nodes: must be at most 131,072 ranks"),
        (["init", "--num-embeddings", "9" * 25], "'--num-embeddings'"),
        (["init", "--embedding-dim", "65537"], "'--embedding-dim'"),
        (["init", "--pooling-factor", "1e300"], "'--pooling-factor'"),
        (["init", "--batch-size", "9" * 25], "'--batch-size'"),
        (["init", "--num-tables", "100", "--num-embeddings", str(2**40), "--embedding-dim", "65536"], "in total"),
        (["simulate", "nothing", "--batches", "9" * 13], "'--batches'"),
    ],
)
def test_what_no_file_holds_is_refused_before_it_is_written(arguments, said, refused, tmp_path):
    assert said in refused(*arguments)
    assert not list(tmp_path.iterdir())
