"""Options, parts and results that all studies share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import plotly.graph_objects as go
import pytest
import typer

from autoshard.commands.options import command_options
from autoshard.core.accepted import FINITE_AT_LEAST_0, WHOLE_AT_LEAST_1
from autoshard.core.errors import FormatError, InvalidOptionError, UnknownNameError
from autoshard.report.figures import in_house_style
from autoshard.report.images import FigureReport, ImageError, Section, find_browser
from autoshard.table import Table
from studies.frame import (
    Machine,
    OutputOptions,
    PartStore,
    StudyResult,
    command_line,
    names_in,
    numbers_in,
    options_without,
)
from studies.frame.results import write_result


@dataclass(frozen=True)
class Pair:
    first: float
    others: tuple[int, ...]


class TestPartStore:
    @pytest.mark.smoke
    def test_a_part_is_made_once(self, tmp_path):
        store, made = PartStore(tmp_path), []

        def make():
            made.append(1)
            return {"value": 0.1, "pair": (1, 2)}

        assert not store.has("figure/part")
        assert store.find("figure/part", make) == {"value": 0.1, "pair": [1, 2]}
        assert PartStore(tmp_path).find("figure/part", make) == {"value": 0.1, "pair": [1, 2]}
        assert len(made) == 1

    def test_a_part_that_fails_leaves_nothing(self, tmp_path):
        store = PartStore(tmp_path)

        def fail():
            raise UnknownNameError("nothing")

        with pytest.raises(UnknownNameError):
            store.find("figure/part", fail)
        assert not store.has("figure/part")

    def test_another_study_is_refused(self, tmp_path):
        PartStore.of(tmp_path, {"num_tables": 80, "transfer": ((80, 8),)})
        PartStore.of(tmp_path, {"num_tables": 80, "transfer": ((80, 8),)})
        with pytest.raises(InvalidOptionError, match="num_tables is 80, not 40"):
            PartStore.of(tmp_path, {"num_tables": 40, "transfer": ((80, 8),)})

    @pytest.mark.parametrize("text", ["{", "[]", '{"elapsed_s": 1}'])
    def test_a_damaged_part_is_named(self, tmp_path, text):
        store = PartStore(tmp_path)
        store.find("figure/part", dict)
        (tmp_path / "parts/figure/part.json").write_text(text)
        with pytest.raises(FormatError, match=r"part\.json"):
            store.read("figure/part")

    def test_dataclasses_come_back_as_they_were(self, tmp_path):
        pair = Pair(0.5, (1, 2))
        for store in (PartStore(tmp_path), PartStore(tmp_path), PartStore(None)):
            assert store.find_data("pair", Pair, lambda: pair) == pair
        (tmp_path / "parts/pair.json").write_text('{"result": {"first": "x"}}')
        with pytest.raises(FormatError, match=r"pair\.json: first: "):
            PartStore(tmp_path).find_data("pair", Pair, lambda: pair)

    def test_nothing_is_kept_without_a_folder(self):
        store = PartStore.of(None, {"num_tables": 80})
        assert [store.find("part", lambda value=value: {"value": value}) for value in (1, 2)] == [
            {"value": 1},
            {"value": 2},
        ]
        assert not store.has("part")


@command_options()
class Inner:
    seeds: Annotated[int, typer.Option("--num-seeds")] = 5
    inner_only: int = 1


@command_options()
class Outer:
    store: Annotated[Path, typer.Option()]
    time_limit: Annotated[float, typer.Option()] = 1.0
    quick: Annotated[bool, typer.Option("--quick")] = False
    inner: Inner


@pytest.mark.smoke
def test_command_lines_have_what_differs_from_the_defaults():
    assert command_line("x", Outer(store=Path("a b"), inner=Inner())) == "python -m studies x --store 'a b'"
    options = Outer(store=Path("a"), time_limit=2.5, quick=True, inner=Inner(seeds=3, inner_only=2))
    assert command_line("x", options) == "python -m studies x --store a --time-limit 2.5 --quick --num-seeds 3"
    assert (
        command_line("x", Outer(store=Path("/home/me/samples"), inner=Inner())) == "python -m studies x --store samples"
    )


@pytest.mark.smoke
def test_documents_have_their_schema_what_was_found_and_the_machine():
    machine = Machine.of("x", Outer(store=Path("a"), inner=Inner()))
    assert (machine.device, machine.command) == ("cpu", "python -m studies x --store a")
    for found in (Pair(0.5, (1, 2)), {"first": 0.5, "others": [1, 2]}):
        expected = {"schema": "autoshard.x/1", "first": 0.5, "others": [1, 2], "machine": machine.to_json()}
        assert machine.document(found, "autoshard.x/1") == expected


@pytest.mark.smoke
def test_options_are_left_out_by_name():
    options = Outer(store=Path("a"), inner=Inner())
    assert options_without(options, ("store", "inner")) == {"time_limit": 1.0, "quick": False}


@pytest.mark.smoke
def test_names_and_numbers_have_commas_between_them():
    assert names_in(" a, b,,c ") == ("a", "b", "c")
    assert names_in("") == ()
    assert names_in("b, a", "--of", ("a", "b")) == ("b", "a")
    assert numbers_in("64, 512", "--sizes", int, WHOLE_AT_LEAST_1) == (64, 512)
    assert numbers_in("0,1.5", "--shares", float, FINITE_AT_LEAST_0) == (0.0, 1.5)


@pytest.mark.smoke
@pytest.mark.parametrize("text", ["", "a,c"])
def test_names_that_are_not_accepted_are_refused(text):
    with pytest.raises(InvalidOptionError, match=f"^--of: must be any of a, b, got '{text}'$"):
        names_in(text, "--of", ("a", "b"))


@pytest.mark.smoke
@pytest.mark.parametrize("text", ["", "64,many", "64,0", "64,1.5"])
def test_numbers_that_are_not_accepted_are_refused(text):
    message = f"^--sizes: each must be a whole number of at least 1, with commas between them, got '{text}'$"
    with pytest.raises(InvalidOptionError, match=message):
        numbers_in(text, "--sizes", int, WHOLE_AT_LEAST_1)


@pytest.fixture
def result():
    table = Table(columns=("name", "ms"), rows=(("a", "1.25"),), caption="Milliseconds")
    figure = in_house_style(go.Figure(go.Bar(x=["a"], y=[1.25])), height=200)
    page = FigureReport(
        title="Times",
        subtitle="a machine",
        sections=(Section(title="First", caption="It grows.", figure=figure, tables=(table,)),),
        facts=(("Slowest", "3 ms", "of three"),),
        provenance=(("Command", "python -m x"),),
    )
    return StudyResult(
        name="times", document={"numbers": [1, 2]}, page=page, notes=("Two runs.",), images={"": figure, "-b": figure}
    )


@pytest.mark.smoke
def test_markdown_has_page_tables_and_notes(result):
    assert result.to_markdown().split("\n\n") == [
        *("# Times", "a machine", "- Slowest: **3 ms** (of three)\n- Command: python -m x"),
        *("## First", "It grows.", "**Milliseconds**", "| name | ms |\n| --- | ---: |\n| a | 1.25 |", "Two runs."),
    ]


def test_results_are_printed_and_written(result, tmp_path, capsys):
    OutputOptions(output_dir=tmp_path / "new", images=False).write(result)
    printed = capsys.readouterr()
    assert printed.out.strip() == result.to_markdown()
    assert json.loads((tmp_path / "new" / "times.json").read_text()) == result.document
    assert "It grows." in (tmp_path / "new" / "times.html").read_text()
    assert printed.err == f"Wrote {tmp_path}/new/times.json, {tmp_path}/new/times.html.\n"
    OutputOptions(as_json=True).write(result)
    assert json.loads(capsys.readouterr().out) == result.document


def test_images_are_drawn_beside_the_numbers(result, tmp_path):
    try:
        find_browser()
    except ImageError as error:
        pytest.skip(str(error))
    files = write_result(result, tmp_path)
    assert [file.name for file in files] == ["times.json", "times.html", "times.png", "times-b.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[2:])


def test_without_a_browser_numbers_and_page_are_written(result, tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    message = r"times\.png: .*BROWSER_PATH must name.*none.*times\.json, .*times\.html are written"
    with pytest.raises(ImageError, match=message):
        write_result(result, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["times.html", "times.json"]


def test_a_place_that_cannot_be_written_is_an_error(result, tmp_path):
    (tmp_path / "times.json").mkdir()
    with pytest.raises(FormatError, match=r"times\.json: cannot be written"):
        write_result(result, tmp_path)
