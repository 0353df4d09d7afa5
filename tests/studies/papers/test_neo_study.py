"""Neo's evaluation: the models of Table 3, and what is predicted for them on ZionEX."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from autoshard.core.step import Overlap
from autoshard.core.tables import DType
from autoshard.planners.neo import NeoPlanner
from studies.papers.neo import (
    DENSE_PARAMETER_BYTES,
    FULL_RANKS,
    MODEL_A,
    MODEL_F,
    MODEL_I,
    NeoResults,
    gains,
    optimisation_runs,
    outcome,
    published_qps,
    request_of,
    results_document,
    results_tables,
    scaling,
    scaling_runs,
    throughput_runs,
    total_gain,
    upload_ms,
    zionex,
)

MODELS = (MODEL_A, MODEL_F, MODEL_I)
TERA = 10**12

_priced = cache(outcome)


def priced(runs):
    return [(run, _priced(run)) for run in runs]


class TestModels:
    """Table 3."""

    @pytest.mark.parametrize(
        ("model", "parameters", "mflops", "layers"),
        [(MODEL_A, 793e9, 638, 20), (MODEL_F, 12e12, 5, 7), (MODEL_I, 332e9, 60, 43)],
        ids="AFI",
    )
    def test_parameters_operations_and_layers_are_the_paper_s(self, model, parameters, mflops, layers):
        tables = model.tables(FULL_RANKS, DType.FP16)
        assert sum(one.num_embeddings * one.embedding_dim for one in tables.tables) == pytest.approx(parameters, 1e-3)
        dense = tables.dense
        assert len(dense.bottom_mlp) + len(dense.top_mlp) == layers
        width = sum(one.embedding_dim for one in tables.tables)
        widths = (dense.num_dense_features, *dense.bottom_mlp), (dense.bottom_mlp[-1] + width, *dense.top_mlp)
        products = sum(a * b for of in widths for a, b in pairwise(of))
        assert 2 * products == pytest.approx(mflops * 1e6, rel=0.02)

    @pytest.mark.parametrize(
        ("model", "least", "most", "mean", "pooling"),
        [(MODEL_A, 4, 384, 93, 15), (MODEL_F, 256, 256, 256, 20), (MODEL_I, 92, 92, 92, 70)],
        ids="AFI",
    )
    def test_dims_and_pooling_are_the_paper_s(self, model, least, most, mean, pooling):
        tables = model.tables(FULL_RANKS, DType.FP32).tables
        dims = [one.embedding_dim for one in tables]
        assert least <= min(dims)
        assert max(dims) <= most
        assert sum(dims) / len(dims) == pytest.approx(mean, rel=0.01)
        assert sum(one.pooling_factor for one in tables) / len(tables) == pytest.approx(pooling)

    def test_fewer_ranks_have_tables_with_as_many_rows_fewer(self):
        # Sec. 8.3: "we reduce the embedding table cardinality".
        full, few = (MODEL_A.tables(ranks, DType.FP16) for ranks in (128, 8))
        assert few.batch_size * 16 == full.batch_size == 65536
        for one, other in zip(full.tables, few.tables, strict=True):
            assert other.num_embeddings == pytest.approx(one.num_embeddings / 16, abs=1)

    def test_model_f_takes_24_terabytes_in_fp16(self):
        tables = MODEL_F.tables(FULL_RANKS, DType.FP16).tables
        assert sum(one.weight_bytes for one in tables) == pytest.approx(24 * TERA, rel=1e-6)
        assert sorted(one.num_embeddings for one in tables)[-4:] == [10**10] * 4


class TestRuns:
    def test_a_share_of_zionex_s_memory_is_left_for_all_else(self):
        assert zionex(128).memory_bytes.hbm == int(0.6 * 40 * 2**30)
        assert zionex(8).world_size == 8

    def test_all_inputs_of_a_rank_are_uploaded(self):
        (run,) = (run for run in throughput_runs("neo") if run.name == "A")
        plan = replace(request_of(run))
        # 512 samples with 15 ids of 8 bytes and a length of 4 for each of 1,000 tables, 1,000 dense features; 32 GB/s.
        found = upload_ms(NeoPlanner().plan(plan))
        assert found == pytest.approx(512 * (1000 * (15 * 8 + 4) + 4000) / 32e9 * 1e3, rel=1e-6)

    def test_serialised_and_exposed_times(self):
        (found,) = (found for run, found in priced(throughput_runs("neo")) if run.name == "A")
        operators = found.operators()
        for serialised, exposed in operators.values():
            assert serialised >= exposed - 1e-9 >= -1e-9
        # Sec. 8.3: host-to-device is completely hidden, the all-reduce mostly, and less is exposed than serialised.
        assert operators["host to device"][1] == 0.0
        assert operators["all-reduce"][1] < 0.5 * operators["all-reduce"][0]
        assert found.step_ms < sum(serialised for serialised, _ in operators.values())
        # 319 million parameters, each 44 bytes a step at 1,300 GB/s.
        assert found.times.overhead == pytest.approx(319e6 * DENSE_PARAMETER_BYTES / 1300e9 * 1e3, rel=0.03)

    def test_overlaps_are_ordered(self):
        for _, found in priced(throughput_runs("neo")[:1]):
            assert found.step_with(Overlap.NEO) >= found.step_ms >= found.roofline_ms


class TestTargets:
    """Within 25% in throughput; what is missed is in docs/results/neo.md."""

    @pytest.mark.slow
    @pytest.mark.smoke
    def test_throughput_of_model_a(self):
        ((run, found),) = priced(one for one in throughput_runs("neo") if one.name == "A")
        assert found.qps(run) == pytest.approx(1.2e6, rel=0.25)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["A", "I"])
    def test_throughput_by_auto(self, name):
        ((run, found),) = priced(one for one in throughput_runs("auto") if one.name == name)
        assert found.qps(run) > 0.75 * run.paper_qps, "it may find what is faster than the paper's plans"

    @pytest.mark.slow
    def test_scaling_of_model_a(self):
        # Sec. 8.3: "around 50%".
        assert scaling(priced(scaling_runs(MODEL_A, "auto")))[128] == pytest.approx(0.50, abs=0.10)


def test_published_throughputs_of_fig_11():
    # "Below 700 KQPS" at first, 1.2 MQPS with 64K samples, 1.5 MQPS with 256K, 87% for three steps.
    published = published_qps()
    assert published[0] < 700e3
    assert published[3] == 1.2e6
    assert published[4] == pytest.approx(1.5e6)
    assert published[3] / published[0] - 1 == pytest.approx(0.87, abs=0.01)


@pytest.mark.slow
def test_numbers_are_written_beside_the_paper_s():
    results = NeoResults(
        throughput={"neo": priced(throughput_runs("neo")[:1])},
        scaling={"neo": {"A": priced(scaling_runs(MODEL_A, "neo"))}},
        optimisations={"neo": priced(optimisation_runs("neo"))},
    )
    runs = results.optimisations["neo"]
    assert total_gain(runs) == pytest.approx((1 + gains(runs)[1]) * (1 + gains(runs)[2]) * (1 + gains(runs)[3]) - 1)
    text = "\n".join(table.to_markdown() for table in results_tables(results))
    assert "| A | `neo` |" in text
    assert "about 50%" in text
    (written,) = results_document(results)["throughput"]["neo"]
    assert written["qps"] == pytest.approx(65536 / written["step_ms"] * 1e3)
