"""Batches whose ids travel ahead, embeddings that travel while others compute, gradients that leave early."""

import sys
import threading
import time
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from autoshard.core import Pooling
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.core.step import Overlap, StepCollective
from autoshard.runtime import RunRequest
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.ids.prefetch import Prefetcher
from autoshard.runtime.engine.ids.requests import InputExchange
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.launch import running_workers
from autoshard.runtime.timing import Part, Span, StepTimer
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.gradients import GradientBuckets
from autoshard.runtime.training.step import distributed_step
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make
from tests.ranks import on_ranks

SETTINGS = FusedSettings(learning_rate=0.05)
BATCH_SIZE = 6
CPU = torch.device("cpu")


@pytest.fixture
def plan():
    tables = [make.table("t", 40, 8), make.table("u", 30, 12, pooling=Pooling.MEAN)]
    tables.append(make.table("s", 40, 8, pooling=Pooling.SEQUENCE))
    return make.table_wise_plan(tables, [0, 0, 0], world_size=1, batch_size=BATCH_SIZE)


@pytest.fixture
def batches(plan):
    return [draw_samples(plan.tables, 13, BATCH_SIZE, (number,)) for number in range(4)]


@pytest.mark.usefixtures("one_process")
class TestPrefetching:
    def test_embeddings_are_the_same_however_far_ahead_the_ids_go(self, plan, batches):
        embeddings = ShardedEmbeddings(plan, SETTINGS)
        under_way = [embeddings.prefetch(batch.ids) for batch in batches]
        for batch, prefetched in zip(batches, under_way, strict=True):
            expected, embedded = embeddings(batch.ids), embeddings(prefetched)
            assert torch.equal(embedded.pooled_BC, expected.pooled_BC)
            assert torch.equal(embedded.sequences["s_f"], expected.sequences["s_f"])

    def test_keyed_batches_give_keyed_embeddings(self, plan, batches):
        from torchrec import KeyedJaggedTensor

        embeddings, ids = ShardedEmbeddings(plan, SETTINGS), batches[0].ids
        keyed = KeyedJaggedTensor(keys=embeddings.feature_names, values=ids.ids_L, lengths=ids.lengths_FB.view(-1))
        pooled, sequences = embeddings(embeddings.prefetch(keyed))
        assert torch.equal(pooled.values(), embeddings(ids).pooled_BC)
        assert list(sequences) == ["s_f"]

    def test_a_bad_batch_is_refused_when_it_is_looked_up_and_the_next_one_is_not(self, plan, batches):
        embeddings, ids = ShardedEmbeddings(plan, SETTINGS), batches[0].ids
        bad = embeddings.prefetch(BatchOfIds(ids.lengths_FB, ids.ids_L + 1000))
        good = embeddings.prefetch(ids)
        with pytest.raises(InputError, match=r"^feature 't_f': table 't' has rows 0 to 39, got id 10"):
            embeddings(bad)
        assert torch.equal(embeddings(good).pooled_BC, embeddings(ids).pooled_BC)

    def test_closing_ends_the_thread(self, plan, batches):
        def threads():
            return [thread for thread in threading.enumerate() if thread.name == "autoshard-prefetch"]

        before, embeddings = threads(), ShardedEmbeddings(plan, SETTINGS)
        embeddings(embeddings.prefetch(batches[0].ids))
        (started,) = set(threads()) - set(before)
        embeddings.close()
        started.join(timeout=30)
        assert not started.is_alive()

    def test_collectives_have_one_order_however_long_batches_take(self, plan, batches, monkeypatch):
        """As on NCCL, where another order on another process could keep it waiting for good."""
        launched, all_to_all = [], dist.all_to_all_single

        def counted(*arguments, **options):
            launched.append(threading.current_thread().name == "autoshard-prefetch")
            return all_to_all(*arguments, **options)

        class Ordered(Prefetcher):
            def __init__(self, exchange, *more):
                super().__init__(slowed(exchange), *more)
                self.is_ordered = True

        def slowed(exchange):
            def distribute(batch, turn):
                time.sleep(next(delays))
                return exchange(batch, turn)

            return distribute

        monkeypatch.setattr("autoshard.runtime.embeddings.Prefetcher", Ordered)
        monkeypatch.setattr(dist, "all_to_all_single", counted)
        orders = []
        for delays_s in ([0.0] * 6, [0.02, 0.0, 0.05, 0.0, 0.03, 0.0]):
            before = set(threading.enumerate())
            delays, embeddings = iter(delays_s), ShardedEmbeddings(plan, SETTINGS)
            under_way = [embeddings.prefetch(batch.ids) for batch in batches[:2]]  # two ahead
            for samples in [*batches[2:], *batches[:2]]:
                embedded = embeddings(under_way.pop(0))
                under_way.append(embeddings.prefetch(samples.ids))
                embedded.pooled_BC.sum().backward()
            (thread,) = set(threading.enumerate()) - before
            embeddings.close()  # with batches under way
            thread.join(timeout=30)
            orders.append([*launched])
            launched.clear()
        # The first message of the first batch has no room for its ids, so that a second follows.
        one_step = [False, True, False]
        assert orders[0][: 2 + 4 * 3] == [True, True, *one_step * 4]
        assert orders[0][: 2 + 4 * 3] == orders[1][: 2 + 4 * 3]

    def test_the_exposed_part_of_the_input_is_what_the_step_waits(self, plan, batches):
        timer = StepTimer(CPU)
        embeddings = ShardedEmbeddings(plan, SETTINGS, timer=timer)
        embeddings(embeddings.prefetch(batches[0].ids))
        timings = timer.take()
        time = timings.collectives[StepCollective.INPUT]
        assert time.serialised_ms > 0
        assert 0 < time.exposed_ms <= timings.parts[Part.INPUT]


def rows_beside_each_other():
    """Rows that two embeddings look up whose threads run in another order on process 1; and groups of those after."""
    plan = make.table_wise_plan([make.table("t", 40, 4)], [0], batch_size=4)
    one, two = (ShardedEmbeddings(plan, SETTINGS) for _ in range(2))
    weights_ND = one.table_state("t").weights_ND

    def batch(first):
        return BatchOfIds(torch.ones(1, 2, dtype=torch.int64), torch.tensor([first, first + 1]))

    for _ in range(2):  # messages have room for a batch then
        for embeddings in (one, two):
            embeddings(embeddings.prefetch(batch(0)))
    exchange, is_late = InputExchange.__call__, dist.get_rank() == 1

    def delayed(self, *arguments):
        if is_late and self is one._prefetcher.exchange:
            time.sleep(0.3)
        return exchange(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(InputExchange, "__call__", delayed)
        under_way = one.prefetch(batch(4)), two.prefetch(batch(20))
        found = [embeddings(of).pooled_BC for embeddings, of in zip((one, two), under_way, strict=True)]
    rows = [[(weights_ND - row_D).abs().sum(dim=1).argmin().item() for row_D in of] for of in found]
    for embeddings in (one, two):
        embeddings.close()
    for thread in threading.enumerate():
        if thread.name == "autoshard-prefetch":
            thread.join(timeout=30)
    dist.barrier()
    num_groups = len(dist.distributed_c10d._world.pg_names)
    following = ShardedEmbeddings(plan, SETTINGS)
    following(following.prefetch(batch(0)))
    return rows, len(dist.distributed_c10d._world.pg_names) - num_groups


def test_embeddings_beside_each_other_get_their_own_rows_and_later_ones_the_groups_of_closed_ones():
    assert on_ranks(rows_beside_each_other, 2) == [([[4, 5], [20, 21]], 0)] * 2


def test_time_of_collectives_beside_each_other_counts_once():
    timer = StepTimer(CPU)
    for begun, ended, waited in [(1.0, 3.0, 2.5), (2.0, 4.0, 3.0), (0.5, 0.75, 0.5), (2.0, 3.0, 3.0)]:
        timer.count(StepCollective.ALL_REDUCE, Span(begun, ended), Span(waited, ended))
    time = timer.take().collectives[StepCollective.ALL_REDUCE]
    # From 1 to 4 s, and a quarter before.
    assert (time.serialised_ms, time.exposed_ms) == (3250.0, 500.0 + 1000.0 + 250.0)


def test_a_gpu_is_waited_for_once_and_not_by_reading_the_clock(monkeypatch):
    class Event:
        now_ms, is_there = 0.0, False

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.now_ms += 1.0
            self.ms = Event.now_ms

        def elapsed_time(self, other):
            assert Event.is_there, "nobody has waited"
            return other.ms - self.ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "is_there", True))
    timer = StepTimer(torch.device("cuda"))
    steps = []
    for _ in range(2):
        with timer.measure(Part.INPUT, StepCollective.INPUT):
            pass
        steps.append(timer.take())
    timer.wait()
    for timings in steps:
        assert timings.parts[Part.INPUT] == timings.collectives[StepCollective.INPUT].serialised_ms == 1.0


def states(plan, batches, overlap, num_ahead=0):
    timer = StepTimer(CPU)
    embeddings = ShardedEmbeddings(plan, SETTINGS, timer=timer)
    dense = DenseModel(default_layers(embeddings.feature_dims), embeddings.feature_dims, seed=0)
    step = distributed_step(embeddings, plan.tables, dense, 0.05, overlap=overlap, timer=timer)
    for number, samples in enumerate(batches):
        step(samples, batches[number + 1 : number + 1 + num_ahead])
    tables = [embeddings.table_state(table.name) for table in plan.tables.tables]
    return [*dense.parameters(), *(tensor for one in tables for tensor in (one.weights_ND, *one.moments.values()))]


@pytest.mark.usefixtures("one_process")
def test_steps_are_the_same_to_the_last_bit(plan, batches):
    expected = states(plan, batches, Overlap.NONE)
    for num_ahead in (1, 2):
        found = states(plan, batches, Overlap.PIPELINED, num_ahead)
        assert len(found) == len(expected) > 6
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def trained(plan, lookups):
    """State of the tables after steps on looked up batches, and the numbers of these."""
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    numbers = []
    for number, embedded in lookups(embeddings):
        (embedded.pooled_BC.square().sum() + embedded.sequences["s_f"].square().sum()).backward()
        embeddings.end_step()
        numbers.append(number)
    states = [embeddings.table_state(table.name) for table in plan.tables.tables]
    return numbers, [tensor for one in states for tensor in (one.weights_ND, *one.moments.values())]


@pytest.mark.usefixtures("one_process")
class TestPipeline:
    def test_a_loop_trains_as_without_one_and_ends_with_its_batches(self, plan, batches):
        def blocking(embeddings):
            return ((number, embeddings(samples.ids)) for number, samples in enumerate(batches))

        def pipelined(embeddings):
            for (number, _), lookup in embeddings.pipelined(enumerate(batches), lambda one: one[1].ids):
                yield number, lookup.wait()

        (numbers, states), (expected_numbers, expected) = trained(plan, pipelined), trained(plan, blocking)
        assert numbers == expected_numbers == [0, 1, 2, 3]
        assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))

    def test_batches_are_taken_one_ahead(self, plan, batches):
        taken = []

        def source():
            for number, samples in enumerate(batches):
                taken.append(number)
                yield samples.ids

        embeddings = ShardedEmbeddings(plan, SETTINGS)
        seen = [len(taken) for _, lookup in embeddings.pipelined(source()) if lookup.wait()]
        assert seen == [2, 3, 4, 4]
        assert list(embeddings.pipelined([])) == []

    @pytest.mark.parametrize("error", [OSError("the disk is gone"), InputError("the file ends here", field="loader")])
    def test_an_error_comes_when_it_is_its_batchs_turn(self, plan, batches, error):
        def source():
            yield from (samples.ids for samples in batches[:2])
            raise error

        embeddings = ShardedEmbeddings(plan, SETTINGS)
        turns = embeddings.pipelined(source())
        for ids, lookup in islice(turns, 2):
            assert ids.batch_size == len(lookup.wait().pooled_BC)
        with pytest.raises(InputError) as raised:
            next(turns)
        if isinstance(error, OSError):
            assert str(raised.value).startswith("batch: cannot be read: OSError: the disk is gone")
            assert raised.value.__cause__ is error
        else:
            assert str(raised.value).startswith("loader: the file ends here")
        assert len(embeddings(batches[2].ids).pooled_BC) == BATCH_SIZE


@pytest.mark.usefixtures("one_process")
class TestGradientBuckets:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def reduced(self, monkeypatch, model, **options):
        """Sizes of the all-reduces, before and after `average` is called."""
        sizes, all_reduce = [], dist.all_reduce

        def counted(flat, **rest):
            sizes.append(len(flat))
            return all_reduce(flat, **rest)

        monkeypatch.setattr(dist, "all_reduce", counted)
        buckets = GradientBuckets(model, dist.group.WORLD, StepTimer(CPU), **options)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            before = len(sizes)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            buckets.average()
            # Of one process, the mean is its own.
            assert all(torch.equal(one.grad, own) for one, own in zip(model.parameters(), gradients, strict=True))
        return sizes, before

    def test_they_leave_early_in_the_backward_pass_or_all_at_its_end(self, monkeypatch, model):
        # A layer has 72 numbers: one bucket for each. What a process asks travels with the first.
        assert self.reduced(monkeypatch, model, bucket_bytes=72 * 4) == ([73, 72, 72] * 2, 3)
        assert self.reduced(monkeypatch, model, bucket_bytes=72 * 4, early=True) == ([73, 72, 72] * 2, 6)

    def test_small_layers_travel_together_and_large_ones_alone(self, monkeypatch, model):
        assert self.reduced(monkeypatch, model)[0] == [217, 217]
        assert self.reduced(monkeypatch, model, bucket_bytes=4)[0] == [9, 64, 8, 64, 8, 64] * 2


WORKER = """
import torch.distributed as dist

from autoshard.core.errors import InvalidOptionError
from autoshard.formats import read_plan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.ids.prefetch import Prefetcher
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.training.synthetic import draw_samples


def work(plan_path, _folder, rank):
    dist.init_process_group("gloo")
    plan = read_plan(plan_path)
    embeddings = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.1))
    batches = [draw_samples(plan.tables, 1, embeddings.local_batch_size, (n, rank)).ids for n in range(2)]
    first = embeddings.prefetch(batches[0])
    embeddings(first).pooled_BC.sum().backward()
    second = embeddings.prefetch(batches[1])
    if rank == 1:
        embeddings.prefetch(batches[0])  # process 0 never sends it: this is under way for good
        raise InvalidOptionError("something is wrong here", field="option")
    embeddings(second).pooled_BC.sum().backward()  # process 1 does not look it up


run_worker(work)
"""


@pytest.mark.slow
def test_an_error_while_ids_are_under_way_ends_every_process_with_it(tmp_path):
    from autoshard.formats import write_plan

    write_plan(make.table_wise_plan([make.table("a"), make.table("b")], [0, 1]), tmp_path / "plan.json")
    (tmp_path / "failing_worker.py").write_text(WORKER, encoding="utf-8")
    path = [*sys.path, str(tmp_path)]
    workers = running_workers("failing_worker", str(tmp_path / "plan.json"), 2, timeout_s=120, path=path)
    with pytest.raises(InvalidOptionError, match=r"^option: something is wrong here$"), workers as (_, documents):
        list(documents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "neo"}, 'overlap: must be one of none, pipelined, got "neo"'),
        ({"overlap": "pipelined", "engine": "torchrec"}, 'overlap: must be one of none, got "pipelined"'),
    ],
)
def test_what_is_not_overlapped_is_refused(options, message):
    with pytest.raises(InvalidOptionError) as refused:
        RunRequest(plan_path="plan.json", **options)
    assert str(refused.value) == message
