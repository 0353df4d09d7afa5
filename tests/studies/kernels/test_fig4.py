"""AutoShard's Fig. 4: measured by the command, drawn again from its numbers."""

import json
from dataclasses import replace

import pytest

from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.report.images import ImageError, find_browser
from bench.kernels.harness import Settings
from bench.measuring.devices import find_device
from studies.frame import read_document, to_document
from studies.kernels.fig4 import (
    FIG4_SCHEMA,
    CostGrid,
    Fig4,
    SumOfSingles,
    TableGrid,
    fig4_result,
    measure_fig4,
    num_sets,
)

TINY = TableGrid(num_bags=8, num_combinations=2, tables_per_combination=3).up_to(1000)


def has_browser():
    try:
        find_browser()
    except ImageError:
        return False
    return True


@pytest.fixture(scope="module")
def fig4(harness):
    return measure_fig4(harness, TINY, command="python -m studies fig4")


def test_the_grid_is_the_papers():
    grid = TableGrid.for_device(find_device("cpu"))
    assert {shard.pooling_factor for line in grid.sizes() for shard in line} == {32.0}
    assert {(s.num_embeddings, s.embedding_dim) for line in grid.lookups() for s in line} == {(1_000_000, 32)}
    by_ratio = [float(line[0].access.coverage(100)) for line in grid.lookups()]
    assert by_ratio == [1.0] * len(grid.pooling_factors)  # 0.0001 of 10^6 rows get all lookups
    combinations = grid.combinations()
    assert [len(shards) for shards in combinations] == [10] * 50
    assert combinations == grid.combinations()
    assert {shard.num_bags for shards in combinations for shard in shards} == {1024}


@pytest.mark.smoke
def test_all_panels_are_measured(harness, fig4):
    advanced = []
    again = measure_fig4(harness, replace(TINY, seed=1), seconds=0.001, advance=advanced.append)
    assert sum(advanced) == pytest.approx(num_sets(replace(TINY, seed=1)))
    assert again.num_passes == 1
    assert [len(line) for line in fig4.sizes.kernel_ms] == [1] * 5
    assert [len(line) for line in fig4.lookups.kernel_ms] == [5] * 6
    assert len(fig4.combinations.fused_ms) == 2
    assert fig4.machine.device == "cpu"
    assert min(value for line in fig4.lookups.kernel_ms for value in line) > 0


def test_a_second_pass_is_made_while_there_is_time(harness):
    grid = replace(TINY, embedding_dims=(4,), pooling_factors=(1,), accessed_ratios=(1.0,), num_combinations=1)
    advanced = []
    found = measure_fig4(harness, grid, seconds=1.0, advance=advanced.append)
    assert found.num_passes == pytest.approx(sum(advanced) / num_sets(grid))
    assert found.num_passes >= 1


def test_tables_that_do_not_fit_are_left_out(harness, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.kernels.fig4.free_bytes", lambda _: 3 * 1000 * 64 * 4)  # a third is 1,000 rows of 64
    found = measure_fig4(harness, replace(TINY, pooling_factors=(1,), num_combinations=1))
    assert [line[0] is None for line in found.sizes.kernel_ms] == [False, False, False, True, True]
    result = fig4_result(found)
    assert "2 tables did not fit in memory" in result.page.sections[0].caption
    (tmp_path / "fig4.json").write_text(json.dumps(result.document))
    assert read_document(tmp_path / "fig4.json", Fig4, FIG4_SCHEMA) == found


def test_captions_say_what_is_seen(fig4):
    sizes = CostGrid(columns=(1e3, 1e6), lines=(16, 32), forward_ms=((1, 2), (2, 5)), backward_ms=((0.5, 1), (1, 2.5)))
    lookups = replace(sizes, columns=(0.01, 1.0), lines=(1, 64))
    sums = SumOfSingles(single_sum_ms=(10.0, 20.0), fused_ms=(5.0, 10.0))
    result = fig4_result(replace(fig4, sizes=sizes, lookups=lookups, combinations=sums))
    first, second, third = (section.caption for section in result.page.sections)
    assert "16 to 32 the time grows 2.2 times" in first  # 3 / 1.5 and 7.5 / 3: 2 and 2.5, 2.25 in the middle
    assert "to the largest table 2.2 times" in first  # 3 / 1.5 and 7.5 / 3
    assert "takes 2.5 times as long as one of which 0.01" in second
    assert "0.50 times the sum" in third
    assert "off by 0.0% on average" in third
    assert result.page.sections[2].tables[0].lines == (("1", "10.0", "5.00", "0.500"), ("2", "20.0", "10.0", "0.500"))


def test_the_fit_is_by_least_squares_through_the_origin():
    sums = SumOfSingles(single_sum_ms=(1.0, 2.0), fused_ms=(1.0, 1.0))
    assert sums.fitted_ratio == pytest.approx(3 / 5)
    assert sums.mean_error == pytest.approx((0.4 + 0.2) / 2)


def test_the_command_writes_all_files_and_draws_them_again(tmp_path, quick_settings, monkeypatch, capsys, run_study):
    monkeypatch.setattr(Settings, "for_device", classmethod(lambda *_: quick_settings))
    if not has_browser():
        pytest.skip("no Chrome or Chromium draws the image")
    options = ("--device", "cpu", "--batch-size", 8, "--max-rows", 1000, "--combinations", 2)
    assert run_study("fig4", "--output-dir", tmp_path / "a", *options) == 0
    numbers = tmp_path / "a" / "fig4.json"
    found = read_document(numbers, Fig4, FIG4_SCHEMA)
    assert found.machine.command == " ".join(map(str, ("python -m studies fig4", *options)))
    assert (tmp_path / "a" / "fig4.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a" / "fig4.html").read_text()
    assert page.count('class="chart"') >= 3
    monkeypatch.setenv("BROWSER_PATH", "/nowhere")
    assert run_study("fig4", "--output-dir", tmp_path / "b", "--from", numbers) == 1
    assert "error: " in capsys.readouterr().err
    assert (tmp_path / "b" / "fig4.json").read_text() == numbers.read_text()
    assert {file.name for file in (tmp_path / "b").iterdir()} == {"fig4.json", "fig4.html"}


def test_numbers_that_do_not_fit_together_are_refused(fig4, tmp_path):
    document = to_document(fig4, FIG4_SCHEMA)
    file = tmp_path / "fig4.json"

    def refused(**changes):
        file.write_text(json.dumps(document | changes))
        with pytest.raises(FormatError) as error:
            read_document(file, Fig4, FIG4_SCHEMA)
        return str(error.value)

    assert "schema: must be 'autoshard.figures.fig4/1', got 'x'" in refused(schema="x")
    assert "num_bags: Input should be greater than 0" in refused(num_bags=0)
    assert "combinations: " in refused(combinations={"single_sum_ms": [1.0, 2.0], "fused_ms": [1.0]})
    assert "sizes: forward_ms: must be 5 lists of 1 numbers" in refused(
        sizes=document["sizes"] | {"forward_ms": [[1.0, 2.0]] * 5}
    )
    file.write_text("[]")
    with pytest.raises(FormatError, match="schema"):
        read_document(file, Fig4, FIG4_SCHEMA)
    with pytest.raises(InvalidOptionError, match="num_bags"):
        replace(TINY, num_bags=0)
