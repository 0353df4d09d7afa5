"""OPER's Table 2 and Fig. 8 and 10 from the planner, and the command that makes them."""

import json

import numpy as np
import pytest

from autoshard.report.images import ImageError, find_browser
from studies.papers.oper.results import (
    AVAZU_ROWS,
    BATCH_PER_RANK,
    INFERENCE,
    LARGE_ROWS,
    MODES,
    TERABYTE_ROWS,
    TRAINING,
    LinkCosts,
    MethodLoads,
    against_exact,
    avazu,
    dgx_a100,
    exchange_by_memory,
    fetched_mib,
    kaggle,
    links,
    make_plan,
    syn_large,
    terabyte,
    two_nodes,
)
from studies.papers.oper.study import PAPER_LINES, PAPER_MEANS, fig8_figure, fig10_figure


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "tables"), [("Avazu", avazu), ("Criteo Kaggle", kaggle), ("Criteo Terabyte", terabyte)]
)
def test_first_line_of_table_2_comes_out_to_its_last_digit(name, tables):
    plan = make_plan(tables(), dgx_a100(), mode="inference", threshold=0.01, balance=0.0, extra_memory_ratio=0.0)
    assert round(float(links(fetched_mib(plan)).mean()), 2) == PAPER_MEANS[name][0]


def test_first_line_of_avazu_needs_no_sizes():
    # Each rank fetches 7/8 of the rows that 16,384 samples look up in 20 tables, an eighth from each rank.
    assert PAPER_MEANS["Avazu"][0] == 20 * BATCH_PER_RANK * 64 / 8 / (1 << 20)
    assert len(avazu().tables) == 20


def test_training_is_flat_and_inference_is_not():
    """Eq. 4 and 5 leave out rows that are looked up too rarely, however much memory there is; Algorithm 1 does not."""
    by_mode = {mode: exchange_by_memory(kaggle(), mode) for mode in MODES}
    trained = [one.mean for one in by_mode[TRAINING][1:]]
    assert trained == [trained[0]] * len(trained)
    assert by_mode[TRAINING][0].mean / trained[0] == pytest.approx(7.93, abs=0.05)
    inferred = [one.mean for one in by_mode[INFERENCE]]
    assert inferred == sorted(inferred, reverse=True)
    for traffic in by_mode.values():
        assert all(one.used <= one.ratio + 1e-9 for one in traffic)


def test_exact_loads_add_up():
    """Without copies, memory and lookups of all ranks are those of the data, whatever CP-SAT finds."""
    tables = kaggle()
    loads = against_exact("Criteo Kaggle", tables, 0.0, effort=0.1).loads
    lookups_mib = 26 * BATCH_PER_RANK * 8 * 64 / (1 << 20)
    assert loads.memory_R.sum() == pytest.approx(tables.storage_bytes / (1 << 20))
    assert loads.lookups_R.sum() == pytest.approx(lookups_mib)
    assert loads.links.sum() == pytest.approx(lookups_mib * 7 / 8)


def test_papers_balance_is_least_over_most():
    shares = [least / most for _, most, least in PAPER_LINES]
    np.testing.assert_allclose(shares, [0.716, 0.801, 0.883, 0.991, 0.991], atol=5e-4)


def test_data_sets_have_the_papers_rows():
    for tables, rows in ((avazu(), AVAZU_ROWS), (terabyte(), TERABYTE_ROWS), (syn_large(), LARGE_ROWS)):
        assert sum(table.num_embeddings for table in tables.tables) == pytest.approx(rows, rel=1e-6)


def test_links_of_two_nodes_differ_as_in_fig_8():
    each = links(np.array(two_nodes().fetch_ms))
    assert each.max() / each.min() == pytest.approx(4.21)
    assert np.count_nonzero(each == each.min()) == 24


def test_figures_show_the_numbers():
    matrix = np.array([[9.0, 2.0], [5.0, 9.0]])
    figure = fig8_figure(LinkCosts(fetch_ms_RR=matrix, alone_ms_RR=2 * matrix, copied_ms_RR=matrix.T))
    assert [trace.z[1][0] for trace in figure.data] == [2.5, 2.5, 1.0]
    assert np.isnan(figure.data[0].z[0][0])
    loads = MethodLoads(memory_R=np.array([1024.0, 3072.0]), lookups_R=np.array([1.0, 2.0]), links=np.array([4.0, 4.0]))
    bars = fig10_figure({"data": {"MG": loads, "OPER": loads}}).data
    assert [list(bar.y) for bar in bars] == [[2.0, 2.0], [1.5, 1.5], [4.0, 4.0]]
    assert (list(bars[0].error_y.array), list(bars[0].error_y.arrayminus)) == ([1.0, 1.0], [1.0, 1.0])


@pytest.mark.slow
@pytest.mark.timeout(900)  # CP-SAT takes some minutes of it
def test_the_command_writes_numbers_tables_and_images(tmp_path, capsys, run_study):
    try:
        find_browser()
    except ImageError as error:
        pytest.skip(str(error))
    assert run_study("oper", "-o", tmp_path) == 0
    document = json.loads((tmp_path / "oper.json").read_text())
    assert "Table 2, Criteo Kaggle" in capsys.readouterr().out
    for name in PAPER_MEANS:
        means = [line["mean"] for line in document["table2_mib"][name][INFERENCE]]
        assert means[1] < means[0] / 6
        assert means == sorted(means, reverse=True)
    assert all(search["exchange_balance"] > 0.98 for search in document["searches"])
    assert all(line["oper"] <= 1.1 * line["exact"] for line in document["cp_sat_mib"])
    assert all(
        set(document["fig10_mib"][name]) >= {"CP-SAT", *(f"OPER, {mode}" for mode in MODES)} for name in PAPER_MEANS
    )
    for name in ("fig8", "fig10"):
        assert (tmp_path / f"oper-{name}.png").read_bytes().startswith(b"\x89PNG")
