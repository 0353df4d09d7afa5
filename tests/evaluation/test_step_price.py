"""How parts make up a step: the formula by hand, dense layers, weights of a step model, intervals, the upper end."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    DenseLayers,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.core.step import (
    ENGINE_WORK,
    PART_FEATURES,
    PART_INDEX,
    Overlap,
    StepCollective,
    StepPart,
    StepTimes,
    plain_coefficients,
)
from autoshard.evaluation import (
    AnalyticDenseModel,
    UpperEndComm,
    at_upper_end,
    evaluate,
    price_step,
)
from autoshard.evaluation.batch_memory import dense_bytes
from autoshard.evaluation.communication import link_bytes
from tests.builders import costs, table, table_wise, tables, topology
from tests.builders import plan as plan_of

COSTS = costs()
DENSE = DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(32, 1))
#: The time of every part, all different, so that a sum or a maximum tells what it is of.
TIMES = StepTimes(
    input=1.0,
    forward_kernel=2.0,
    forward_exchange=4.0,
    backward_exchange=8.0,
    backward_kernel=16.0,
    bottom_forward=5.0,
    bottom_backward=23.0,
    interaction_forward=32.0,
    interaction_backward=64.0,
    top_forward=128.0,
    top_backward=256.0,
    all_reduce=512.0,
    row_reduce=0.0,
    overhead=1024.0,
    group_sync=0.0,
)


def plan(dense=DENSE, batch_size=128):
    of = [table(f"t{index}", pooling_factor=4.0) for index in range(3)]
    return plan_of(
        *table_wise(of, (0, 0, 1)),
        tables=tables(*of, batch_size=batch_size, dense=dense),
        topology=topology(2, latency_s=1e-4),
    )


@dataclass(frozen=True)
class Doubled:
    """A step model by which every model's milliseconds are half of what a step takes, and a step starts in 3 ms."""

    known: tuple[str, ...] = ("analytic:cpu", "alpha-beta")
    overlap: Overlap = Overlap.NONE
    name: str = "doubled"

    def coefficients(self, part, basis, _topology):
        if basis not in self.known:
            return None
        weights = [2.0 * weight for weight in plain_coefficients(part, "cpu")]
        if part is StepPart.DENSE:
            weights[PART_FEATURES[part].index("steps")] = 3.0
        return tuple(weights)

    def interval_ms(self, value_ms, below_ms, above_ms):
        return value_ms - below_ms / 10, value_ms + above_ms / 10


class TestComposition:
    def test_one_after_the_other(self):
        # 1 + 2 + 4 + 8 + 16 + 5 + 23 + 32 + 64 + 128 + 256 + 512 + 1024
        assert TIMES.step_ms(Overlap.NONE) == 2075.0

    def test_neo_equation_1(self):
        # Forward: max(5, 2 + 4) + 32 + 128; backward: max(256 + 64 + max(8 + 16, 23), 512); and 1 + 1024.
        assert TIMES.step_ms(Overlap.NEO) == 6 + 160 + 512 + 1025
        quick = replace(TIMES, all_reduce=1.0, bottom_forward=7.0, bottom_backward=30.0)
        # max(7, 6) + 160; 256 + 64 + max(24, 30); 1025.
        assert quick.step_ms(Overlap.NEO) == 7 + 160 + 350 + 1025

    def test_pipelined(self):
        # Forward: 2 + max(5, 4) + 32 + 128; backward: max(256 + 64 + max(8, 23) + 16, 512); and 1024; input behind.
        assert TIMES.step_ms(Overlap.PIPELINED) == 7 + 160 + 512 + 1024
        rows = replace(TIMES, all_reduce=512.0, row_reduce=300.0)
        # 212 of the all-reduce hide behind 256 + 64 + 23 + 300 + 16.
        assert rows.step_ms(Overlap.PIPELINED) == 7 + 160 + 659 + 1024
        assert replace(TIMES, input=5000.0).step_ms(Overlap.PIPELINED) == 5000.0

    def test_neo_with_the_next_batch_s_input_distribution(self):
        # 1 of input hides behind 128.
        assert TIMES.step_ms(Overlap.NEO_PREFETCH) == TIMES.step_ms(Overlap.NEO) - 1
        # 400 of 528 are left after the top perceptron's forward pass: they outlast 256 + 64, so that the gradients'
        # exchange waits until 400, and the all-reduce of 512, too.
        long = replace(TIMES, input=528.0)
        assert long.step_ms(Overlap.NEO_PREFETCH) == 6 + 160 + (400 + 512) + 1024
        # Without that all-reduce: 400 + max(8 + 16, 23).
        assert replace(long, all_reduce=0.0).step_ms(Overlap.NEO_PREFETCH) == 6 + 160 + (400 + 24) + 1024

    def test_a_collective_is_exposed_where_the_step_would_be_shorter_without_it(self):
        for overlap in Overlap:
            for collective, time in TIMES.collectives(overlap).items():
                without = replace(TIMES, **{collective.value: 0.0})
                assert time.serialised_ms == getattr(TIMES, collective.value)
                assert time.exposed_ms == TIMES.step_ms(overlap) - without.step_ms(overlap)
        exposed = {one: time.exposed_ms for one, time in TIMES.collectives(Overlap.PIPELINED).items()}
        assert exposed == {
            StepCollective.INPUT: 0.0,
            StepCollective.FORWARD_EXCHANGE: 0.0,
            StepCollective.BACKWARD_EXCHANGE: 0.0,
            StepCollective.ALL_REDUCE: 512.0 - (256 + 64 + 23 + 16),
            StepCollective.GROUP_SYNC: 0.0,
        }

    def test_dense_is_all_that_the_runtime_does_not_time(self):
        timed = TIMES.input + TIMES.forward_kernel + TIMES.forward_exchange
        timed += TIMES.backward_exchange + TIMES.backward_kernel
        assert timed + TIMES.dense == TIMES.step_ms(Overlap.NONE)

    @given(
        parts=st.lists(st.floats(0, 1e3), min_size=14, max_size=14),
        more=st.floats(0, 1e3),
        index=st.integers(0, 13),
        row_share=st.floats(0, 1),
    )
    def test_overlap_never_costs_and_longer_parts_never_save(self, parts, more, index, row_share):
        names = [name for name in StepTimes.__slots__ if name != "row_reduce"]
        times = StepTimes(
            **dict(zip(names, parts, strict=True)), row_reduce=row_share * parts[names.index("all_reduce")]
        )
        for overlap in Overlap:
            assert times.step_ms(overlap) <= times.step_ms(Overlap.NONE) * (1 + 1e-12) + 1e-9
        longer = replace(times, **{names[index]: parts[index] + more})
        for overlap in Overlap:
            assert longer.step_ms(overlap) >= times.step_ms(overlap) - 1e-9


class TestDense:
    def test_layers_and_their_all_reduce_count_where_they_are_described(self):
        with_dense, without = price_step(plan(), COSTS), price_step(plan(dense=None), COSTS)
        assert without.times.dense == 0.0
        # (13 + 1) * 64 + (64 + 1) * 16 in the bottom; 16 + 4 * 3 / 2 products in, so 22; (22 + 1) * 32 + 33 on top.
        num_parameters = 14 * 64 + 65 * 16 + 23 * 32 + 33
        all_reduce_ms = (1e-4 + num_parameters * 4 / 1e9) * 1e3
        assert with_dense.times.all_reduce == pytest.approx(all_reduce_ms)
        assert with_dense.step_ms.value == pytest.approx(without.step_ms.value + with_dense.times.dense)
        assert (with_dense.models["dense"], "dense" in without.models) == ("analytic:cpu", False)

    def test_a_rank_runs_its_local_batch(self):
        small, large = (price_step(plan(batch_size=size), COSTS).times for size in (2**17, 2**23))
        assert large.top_forward == pytest.approx(64 * small.top_forward, rel=0.05)
        assert large.all_reduce == small.all_reduce

    def test_layers_that_make_no_model(self):
        with pytest.raises(InvalidPlanError, match=r"tables\.dense"):
            evaluate(plan(dense=replace(DENSE, top_mlp=(32, 2))), COSTS)

    def test_all_but_memory_for_training_is_as_without(self):
        with_dense, without = evaluate(plan(), COSTS), evaluate(plan(dense=None), COSTS)
        layers = dense_bytes(plan().tables, plan().tables.batch_size / plan().topology.world_size)
        assert layers > 0
        trained = [replace(rank, training_bytes=rank.training_bytes + int(layers)) for rank in without.ranks]
        assert list(with_dense.ranks) == trained
        assert with_dense.max_kernel_ms == without.max_kernel_ms
        assert with_dense.step_ms.value > without.step_ms.value


class TestBreakdown:
    def test_it_says_what_the_step_is_made_of(self):
        for overlap in Overlap:
            price, told = price_step(plan(), COSTS, overlap=overlap), evaluate(plan(), COSTS, overlap=overlap)
            assert (told.overlap, told.models, told.parts) == (overlap, price.models, price.parts)
            assert told.collectives == price.times.collectives(overlap)
            assert told.sync_ms == price.times.all_reduce > 0
            assert told.dense_ms == pytest.approx(price.times.dense - price.times.all_reduce - price.times.overhead)
        one_after_the_other = evaluate(plan(), COSTS)
        assert sum(part.value for part in one_after_the_other.parts.values()) == pytest.approx(
            one_after_the_other.step_ms.value
        )

    def test_without_dense_layers_there_are_none(self):
        told = evaluate(plan(dense=None), COSTS)
        assert (told.dense_ms, told.sync_ms, told.parts[StepPart.DENSE].high) == (0.0, 0.0, 0.0)
        assert told.models == {"kernel": "analytic:cpu", "communication": "alpha-beta"}


class TestStepModel:
    def test_weights_count_where_they_were_calibrated(self):
        plain, doubled = (price_step(plan(), replace(COSTS, step=step)) for step in (None, Doubled()))
        assert doubled.step_ms.value == pytest.approx(2 * (plain.step_ms.value - plain.times.overhead) + 3)
        assert doubled.times.overhead == pytest.approx(3.0)
        assert doubled.models["step"] == "doubled"
        for part in set(StepPart) - {StepPart.DENSE}:
            assert doubled.part_ms(part) == pytest.approx(2 * plain.part_ms(part))

    def test_the_runtimes_own_work_counts_where_it_was_measured(self):
        two = replace(plan().topology, device="cpu:amd-epyc")
        cpu, gpu = (
            price_step(replace(plan(), topology=replace(two, device=one)), COSTS) for one in (two.device, "a100")
        )
        work = ENGINE_WORK["cpu"]
        assert cpu.times.overhead - gpu.times.overhead == pytest.approx(work[StepPart.DENSE]["steps"])
        megabytes_R = cpu.work[StepPart.BACKWARD_EXCHANGE][:, 3]
        expected_R = (
            work[StepPart.BACKWARD_EXCHANGE]["steps"] + work[StepPart.BACKWARD_EXCHANGE]["megabytes"] * megabytes_R
        )
        index = PART_INDEX[StepPart.BACKWARD_EXCHANGE]
        np.testing.assert_allclose(cpu.parts_ms_PR[index] - gpu.parts_ms_PR[index], expected_R)

    def test_weights_of_other_models_do_not_count(self):
        plain = price_step(plan(), COSTS)
        foreign = price_step(plan(), replace(COSTS, step=Doubled(known=("alpha-beta",))))
        assert foreign.times.forward_kernel == plain.times.forward_kernel
        assert foreign.times.forward_exchange == pytest.approx(2 * plain.times.forward_exchange)

    def test_the_interval_is_the_models_where_all_parts_were_calibrated(self):
        known = price_step(plan(), replace(COSTS, step=Doubled())).step_ms
        partly = price_step(plan(), replace(COSTS, step=Doubled(known=("analytic:cpu",)))).step_ms
        assert (known.high - known.value) / known.value < 0.2 < (partly.high - partly.value) / partly.value

    def test_its_overlap_is_the_default(self):
        neo = replace(COSTS, step=Doubled(overlap=Overlap.NEO))
        assert price_step(plan(), COSTS).overlap is Overlap.NONE
        assert price_step(plan(), neo).overlap is Overlap.NEO
        assert price_step(plan(), neo, overlap=Overlap.NONE).overlap is Overlap.NONE

    def test_features_are_what_a_rank_handles(self):
        work = price_step(plan(), COSTS).work
        for part in StepPart:
            assert work[part].shape == (2, len(PART_FEATURES[part]))
        # Rank 0 has two tables of a feature each, one kernel, and looks up all 128 bags of both.
        assert work[StepPart.FORWARD_KERNEL][0, 1:].tolist() == pytest.approx([1, 2, 256e-6])
        # It sends 3 * 64 bags' ids, of which it keeps 2 * 64, and gets 2 * 64 of the other rank: 4 lookups each.
        assert work[StepPart.INPUT][0, 3:].tolist() == pytest.approx([(192 + 256) * 4e-6, (192 + 256) * 1e-6, 0, 0])
        # It sends two vectors of 16 fp32 for each of 128 samples, and gets three for each of 64.
        assert work[StepPart.FORWARD_EXCHANGE][0, 3] == pytest.approx((256 + 192) * 64e-6)


class TestIntervals:
    def test_hold_the_value_and_combine_the_parts(self):
        step = price_step(plan(), COSTS).step_ms
        assert 0 <= step.low < step.value < step.high
        assert evaluate(plan(), COSTS).step_ms == step

    def test_every_part_has_that_of_its_model(self):
        price = price_step(plan(), COSTS)
        for part in StepPart:
            assert price.parts[part].value == price.part_ms(part) == getattr(price.times, part.value)
            assert 0 <= price.parts[part].low < price.parts[part].value < price.parts[part].high
        sent = price.parts[StepPart.FORWARD_EXCHANGE]
        # What ranks work on an exchange was measured, what links take is 0.4 to 4 times what they are said to.
        wire_ms = price.stages.exchange_ms_XBR[1].max()
        assert (sent.value - sent.low, sent.high - sent.value) == pytest.approx((0.6 * wire_ms, 3 * wire_ms))
        # Dense layers may be half or six times as long, their all-reduce 0.4 or four times; squares add up.
        layers, reduced, dense = price.times.dense_layers, price.times.all_reduce, price.parts[StepPart.DENSE]
        assert dense.value == pytest.approx(layers + reduced + price.times.overhead)
        assert dense.high - dense.value == pytest.approx(np.hypot(5 * layers, 3 * reduced))
        assert dense.value - dense.low == pytest.approx(np.hypot(0.5 * layers, 0.6 * reduced))

    def test_parts_keep_their_relative_intervals_where_a_step_model_knows_better_of_the_whole(self):
        plain, doubled = (price_step(plan(), replace(COSTS, step=step)) for step in (None, Doubled()))
        for part in set(StepPart) - {StepPart.DENSE}:
            for end in ("low", "high"):
                assert getattr(doubled.parts[part], end) == pytest.approx(2 * getattr(plain.parts[part], end))

    def test_the_upper_end_is_dearer_in_every_part(self):
        usual, upper = (price_step(plan(), costs) for costs in (COSTS, at_upper_end(COSTS, "cpu")))
        for part in StepPart:
            assert upper.part_ms(part) > usual.part_ms(part)
        # Not all parts err at once, so that the upper end of the sum is below the sum of the upper ends.
        assert upper.step_ms.value > usual.step_ms.high
        assert upper.models["kernel"] == "analytic:cpu (upper end)"

    def test_upper_ends_are_corrected_as_values_are(self):
        calibrated = at_upper_end(replace(COSTS, step=Doubled()), "cpu")
        plain = price_step(plan(), at_upper_end(COSTS, "cpu"))
        models_ms = plain.step_ms.value - plain.times.overhead
        assert price_step(plan(), calibrated).step_ms.value == pytest.approx(2 * models_ms + 3)

    def test_upper_ends_are_the_models(self):
        two = plan().topology
        comm, upper = COSTS.comm, UpperEndComm(COSTS.comm)
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            value = comm.collective_ms(name, 1e6, two)
            assert upper.collective_ms(name, 1e6, two) == comm.bounds_ms(name, np.array([value]), two)[1][0]
        links = link_bytes(np.array([[0.0, 1e6], [1e5, 0.0]]), two)
        expected = comm.bounds_ms("all_to_all", comm.links_ms(links, two), two)[1]
        np.testing.assert_array_equal(upper.links_ms(links, two), expected)

    def test_reduce_scatter_and_all_gather_make_an_all_reduce(self):
        # Half the bytes each, and the latency twice.
        two = plan().topology
        halves = COSTS.comm.collective_ms("reduce_scatter", 1e6, two) + COSTS.comm.collective_ms("all_gather", 1e6, two)
        assert halves == pytest.approx(COSTS.comm.collective_ms("all_reduce", 1e6, two) + 0.1)


def test_analytic_dense_is_the_fallback():
    given = replace(COSTS, dense=AnalyticDenseModel.for_device("cpu"))
    assert price_step(plan(), given).step_ms == price_step(plan(), COSTS).step_ms
