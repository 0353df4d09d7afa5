"""The model of collectives: known truths are found, unmeasured worlds stay sane, registries give back what they got."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.errors import ModelError
from autoshard.evaluation.communication import link_bytes
from autoshard.formats.stores.collective_samples import GroupLevel, Operator, Splits
from costmodel.registry.versions import Registry
from costmodel.step.collective_curve import num_latencies
from costmodel.step.collective_model import COLLECTIVES, CollectiveCard, LearnedCollectives
from costmodel.step.collective_training import train_collective_model
from tests import builders as make

#: The truth of synthetic samples: milliseconds per latency and per byte.
NODE_LATENCY, NODE_BYTE = 0.05, 1e-6
FAR_LATENCY, FAR_BYTE = 0.4, 8e-6
SIZES = [4**power for power in range(5, 14)]


topology = partial(make.topology, latency_s=1e-4)


def sample(operator, level, num_bytes, *, nproc=8, node_size=4, noise=1.0, **fields):
    """A collective with exactly the times of the truth, but for `noise`."""
    usual = make.collective_sample(make.collective(operator, level, num_bytes), nproc=nproc, node_size=node_size)
    latency, byte = (NODE_LATENCY, NODE_BYTE) if level is GroupLevel.NODE else (FAR_LATENCY, FAR_BYTE)
    latency_ms = latency * num_latencies(operator.value, usual.group_size) + byte * usual.mean_sent_bytes
    return replace(usual, **{"latency_ms": latency_ms * noise, **fields})


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [
        sample(operator, level, size, nproc=nproc, node_size=nproc // 2, noise=float(np.exp(rng.normal(0, 0.02))))
        for operator in Operator
        for level in (GroupLevel.NODE, GroupLevel.ACROSS_NODES)
        for size in SIZES
        for nproc in (4, 8, 16)
    ]


@pytest.fixture(scope="module")
def model(samples):
    return train_collective_model(samples).model


def even(world_size, num_bytes):
    """Every rank sends `num_bytes` to others in equal parts."""
    matrix = np.full((world_size, world_size), num_bytes / (world_size - 1))
    np.fill_diagonal(matrix, 0.0)
    return matrix


def all_to_all_ms(model, sent_RR, world):
    return model.links_ms(link_bytes(sent_RR, world), world)


class TestKnownTruth:
    def test_latency_and_bandwidth_are_found_at_a_number_of_ranks_that_was_not_measured(self, model):
        for num_bytes in (2e4, 1e6, 3e7):
            # Six ranks of one node: five latencies one after the other, and the bytes of one rank.
            expected = NODE_LATENCY * 5 + NODE_BYTE * num_bytes
            predicted = all_to_all_ms(model, even(6, num_bytes), topology(6))
            np.testing.assert_allclose(predicted, expected, rtol=0.1)

    def test_reductions_count_what_leaves_a_rank(self, model):
        # 5/6 of the bytes leave a rank for a reduce-scatter or an all-gather, twice that for an all-reduce.
        buffer, sent = 1e7, 1e7 * 5 / 6
        expected = NODE_LATENCY * 5 + NODE_BYTE * sent
        assert model.collective_ms("reduce_scatter", buffer, topology(6)) == pytest.approx(expected, rel=0.1)
        assert model.collective_ms("all_gather", buffer, topology(6)) == pytest.approx(expected, rel=0.1)
        expected = NODE_LATENCY * 2 * np.log2(6) + NODE_BYTE * 2 * sent
        assert model.collective_ms("all_reduce", buffer, topology(6)) == pytest.approx(expected, rel=0.1)

    def test_links_between_nodes_cost_what_they_cost(self, model):
        # Four nodes of one rank each: all bytes leave their node.
        expected = FAR_LATENCY * 3 + FAR_BYTE * 1e6
        np.testing.assert_allclose(all_to_all_ms(model, even(4, 1e6), topology(1, 4)), expected, rtol=0.1)

    def test_ranks_of_a_node_may_share_its_link(self, model):
        # Two nodes of two ranks: one rank sends 2 MB to the other node, the other nothing; each has half of the link.
        sent = np.zeros((4, 4))
        sent[0, 2] = 2e6
        node, cluster = topology(2, 4).levels
        shared = replace(topology(2, 4), levels=(node, replace(cluster, shared_links=True)))
        expected = FAR_LATENCY * 2 + FAR_BYTE * 1e6
        np.testing.assert_allclose(all_to_all_ms(model, sent, shared), expected, rtol=0.1)
        assert all_to_all_ms(model, sent, topology(2, 4)).max() > 1.5 * expected

    def test_inside_and_between_nodes_work_side_by_side_unless_worlds_say_otherwise(self, model, samples):
        # Without samples of worlds the longer of both counts.
        away = even(4, 3e6)
        inside = NODE_LATENCY * 1 + NODE_BYTE * 1e6
        outside = FAR_LATENCY * 2 + FAR_BYTE * 2e6
        np.testing.assert_allclose(all_to_all_ms(model, away, topology(2, 4)), max(inside, outside), rtol=0.1)
        worlds = [
            sample(
                Operator.ALL_TO_ALL,
                GroupLevel.WORLD,
                size,
                nproc=8,
                node_size=4,
                # What one after the other would take: 3 of 7 parts of what leaves stay in the node.
                latency_ms=NODE_LATENCY * 3 + FAR_LATENCY * 4 + size * 7 / 8 * (NODE_BYTE * 3 / 7 + FAR_BYTE * 4 / 7),
            )
            for size in SIZES
        ]
        one_after_the_other = train_collective_model([*samples, *worlds]).model
        assert model.card.alongside["all_to_all"] == 0.0
        assert one_after_the_other.card.alongside["all_to_all"] >= 0.8

    def test_links_one_after_the_other_are_found_where_each_takes_turns_both_ways(self):
        """Two nodes of two ranks; bytes back take as long as bytes away, on both links."""

        def measured(level, splits, size):
            is_both = splits is Splits.EQUAL
            parts = {GroupLevel.NODE: (1, 0), GroupLevel.ACROSS_NODES: (0, 1), GroupLevel.WORLD: (1, 2)}[level]
            # What the busiest rank sends to each peer; where all send, it receives as much.
            each = size / (sum(parts) + 1) if is_both else size
            times = [
                latency * peers + byte * each * peers * (1 + is_both)
                for (latency, byte), peers in zip(((0.05, 6e-6), (0.1, 6e-6)), parts, strict=True)
            ]
            sent = each * sum(parts)
            of = make.collective(Operator.ALL_TO_ALL, level, size, splits=splits)
            busiest = {"max_sent_bytes": int(sent), "max_received_bytes": int(sent if is_both else size)}
            mean = sent if is_both else sent / (sum(parts) + 1)
            return make.collective_sample(of, mean_sent_bytes=mean, latency_ms=sum(times), **busiest)

        found = train_collective_model(
            [
                measured(level, splits, 4**power)
                for level in GroupLevel
                for splits in (Splits.EQUAL, Splits.ONE_WAY)
                for power in range(6, 13)
            ]
        ).model
        assert found.card.both_ways == {"node": 1.0, "across_nodes": 1.0}
        assert found.card.alongside["all_to_all"] >= 0.9

    @pytest.mark.parametrize("one_after_the_other", [False, True])
    def test_both_ways_at_once_cost_what_measured_ones_do(self, one_after_the_other):
        # Two ranks, of which one sends all or each as much; both ways take twice as long where they take turns.
        def measured(splits, size):
            of = make.collective(Operator.ALL_TO_ALL, GroupLevel.ACROSS_NODES, size, splits=splits)
            is_both = splits is Splits.EQUAL
            sent = {"mean_sent_bytes": size / 2, "max_sent_bytes": size // (1 + is_both)}
            latency_ms = FAR_LATENCY + FAR_BYTE * (size / 2 if is_both and not one_after_the_other else size)
            received = {"max_received_bytes": sent["max_sent_bytes"], "latency_ms": latency_ms}
            return make.collective_sample(of, nproc=2, node_size=1, **sent, **received)

        sizes = [2**power for power in range(12, 24)]
        found = train_collective_model(
            [measured(splits, size) for splits in (Splits.EQUAL, Splits.ONE_WAY) for size in sizes]
        ).model
        assert found.card.both_ways == {"node": 0.0, "across_nodes": 1.0 if one_after_the_other else 0.0}
        sent = np.array([[0.0, 1e6], [0.0, 0.0]])
        expected = FAR_LATENCY + FAR_BYTE * 1e6
        np.testing.assert_allclose(all_to_all_ms(found, sent, topology(1, 2)), expected, rtol=0.05)
        both = FAR_LATENCY + FAR_BYTE * (2e6 if one_after_the_other else 1e6)
        np.testing.assert_allclose(all_to_all_ms(found, sent + sent.T, topology(1, 2)), both, rtol=0.05)
        restored = CollectiveCard.from_json(found.card.to_json(), "card.json")
        assert restored.both_ways == found.card.both_ways
        without = {name: value for name, value in found.card.to_json().items() if name != "both_ways"}
        assert CollectiveCard.from_json(without, "card.json").both_ways == {"node": 0.0, "across_nodes": 0.0}

    def test_intervals_hold_what_was_held_out(self, model, samples):
        held = [one for one in samples if one.collective.level is GroupLevel.NODE and one.node_size == 4]
        inside = 0
        for one in held:
            value = np.array([_predicted(model, one)])
            low, high = model.bounds_ms(one.collective.operator.value, value, topology(one.nproc))
            inside += float(low[0]) <= one.latency_ms <= float(high[0])
        assert inside >= 0.85 * len(held)

    def test_disturbed_samples_hardly_matter(self, samples):
        disturbed = [
            replace(one, latency_ms=one.latency_ms * 5) if n % 12 == 0 else one for n, one in enumerate(samples)
        ]
        predicted = all_to_all_ms(train_collective_model(disturbed).model, even(6, 1e6), topology(6))
        np.testing.assert_allclose(predicted, NODE_LATENCY * 5 + NODE_BYTE * 1e6, rtol=0.25)


def _predicted(model, one):
    local = topology(one.node_size)
    buffer = float(one.collective.bytes_per_rank)
    if one.collective.operator is Operator.ALL_TO_ALL:
        return float(all_to_all_ms(model, even(one.node_size, one.max_sent_bytes), local).max())
    return model.collective_ms(one.collective.operator.value, buffer, local)


class TestPromises:
    @given(seed=st.integers(0, 1000))
    def test_relabelling_alike_ranks_relabels_their_times(self, model, seed):
        rng = np.random.default_rng(seed)
        matrix = rng.integers(0, 10**7, (8, 8)).astype(float)
        order = np.concatenate([4 * node + rng.permutation(4) for node in rng.permutation(2)])
        times = all_to_all_ms(model, matrix, topology(4, 8))
        relabelled = all_to_all_ms(model, matrix[np.ix_(order, order)], topology(4, 8))
        np.testing.assert_allclose(relabelled, times[order])

    @given(
        bytes_each=st.tuples(st.floats(1, 1e11), st.floats(1, 1e11)),
        sizes=st.sampled_from([(2,), (3,), (4,), (4, 8), (8, 64), (8, 1024)]),
        name=st.sampled_from([*COLLECTIVES]),
    )
    def test_more_bytes_never_take_less_time_at_any_number_of_ranks(self, model, bytes_each, sizes, name):
        fewer, more = sorted(bytes_each)
        world = topology(*sizes)

        def price(num_bytes):
            if name == "all_to_all":
                return float(all_to_all_ms(model, even(world.world_size, num_bytes), world).max())
            return model.collective_ms(name, num_bytes, world)

        assert 0 < price(fewer) <= price(more) * (1 + 1e-9)
        assert np.isfinite(price(more))
        low, high = model.bounds_ms(name, np.array([price(more)]), world)
        assert 0 <= low[0] <= price(more) <= high[0] < float("inf")

    def test_numbers_of_ranks_that_were_not_measured_have_wider_intervals(self, model):
        value = np.array([5.0])
        widths = []
        for ranks in (8, 64, 512):
            low, high = model.bounds_ms("all_to_all", value, topology(ranks))
            widths.append(float(high[0] / low[0]))
        assert widths == sorted(widths)
        assert widths[0] < widths[2]

    def test_what_stays_and_worlds_of_one_are_free(self, model):
        assert all_to_all_ms(model, np.diag([1e9, 1e9]), topology(2)).tolist() == [0.0, 0.0]
        assert model.collective_ms("all_reduce", 1e6, topology(1)) == 0.0
        assert model.collective_ms("all_reduce", 0.0, topology(4)) == 0.0

    def test_links_that_nobody_measured_are_the_topologys(self, samples):
        known = train_collective_model([one for one in samples if one.collective.level is GroupLevel.NODE]).model
        # 1 MB leaves every node at 1 GB/s behind 0.1 ms.
        matrix = np.array([[0.0, 1e6], [1e6, 0.0]])
        np.testing.assert_allclose(all_to_all_ms(known, matrix, topology(1, 2)), 1.1)


class TestRegistry:
    def test_round_trip(self, model, tmp_path):
        registry = Registry(tmp_path)
        version = model.publish(registry)
        loaded = LearnedCollectives.load(registry, "cpu")
        assert loaded.card == model.card
        assert (loaded.name, model.name) == (f"learned:cpu@{version}", "learned:cpu")
        for world in (topology(4), topology(8, 64)):
            matrix = even(world.world_size, 1e6)
            np.testing.assert_array_equal(all_to_all_ms(loaded, matrix, world), all_to_all_ms(model, matrix, world))
            assert loaded.collective_ms("all_reduce", 1e6, world) == model.collective_ms("all_reduce", 1e6, world)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": "autoshard.collective-model/9"}, "schema: must be autoshard"),
            ({"bounds": {}}, "bounds.all_to_all: is missing"),
            ({"alongside": dict.fromkeys(COLLECTIVES, 1e300)}, "alongside.all_to_all: must be a finite number in"),
            ({"bounds": {name: [[1.0, 0.5, 1e308]] for name in COLLECTIVES}}, r"bounds.all_to_all\[0\]\[2\]"),
            ({"bounds": {name: [[1.0, 2.0, 0.5]] for name in COLLECTIVES}}, r"bounds.all_to_all\[0\]\[1\]: must be"),
            (
                {"bounds": {name: [[2.0, 0.5, 2.0], [1.0, 0.5, 2.0]] for name in COLLECTIVES}},
                "bounds.all_to_all: must be of rising milliseconds",
            ),
        ],
    )
    def test_refuses_foreign_cards(self, model, tmp_path, change, message):
        registry = Registry(tmp_path)
        registry.publish(LearnedCollectives.kind, "cpu", model.tensors(), model.card.to_json() | change)
        with pytest.raises(ModelError, match=message):
            LearnedCollectives.load(registry, "cpu")

    @pytest.mark.parametrize("value", [float("nan"), -1.0])
    def test_refuses_impossible_numbers(self, model, tmp_path, value):
        tensors = model.tensors()
        tensors["node.all_to_all.coefficients"] = tensors["node.all_to_all.coefficients"] * 0 + value
        Registry(tmp_path).publish(LearnedCollectives.kind, "cpu", tensors, model.card.to_json())
        with pytest.raises(ModelError, match="all_to_all"):
            LearnedCollectives.load(Registry(tmp_path), "cpu")

    def test_refuses_models_of_other_devices(self, model, tmp_path):
        with pytest.raises(ModelError, match="device"):
            Registry(tmp_path).publish(LearnedCollectives.kind, "h200", model.tensors(), model.card.to_json())


class TestSamples:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"device": "h200"}, "one device"),
            ({"backend": "nccl"}, "one backend"),
            ({"latency_ms": float("nan")}, "latency_ms: must be finite"),
            ({"reference_ms": 0.0}, "reference_ms: must be finite"),
        ],
    )
    def test_refuses_what_cannot_be_fitted(self, samples, change, message):
        with pytest.raises(ModelError, match=message):
            train_collective_model([*samples[:-1], replace(samples[-1], **change)])

    def test_refuses_too_few(self, samples):
        with pytest.raises(ModelError, match="at least 8 samples"):
            train_collective_model(samples[:3])
