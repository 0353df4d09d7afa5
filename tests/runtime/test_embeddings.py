"""The engine as a module that a trainer uses, in a group of one process."""

import copy
import pickle
import re
from dataclasses import replace

import pytest
import torch

from autoshard.core import DType, Exchange, Feature, Optimizer, Pooling
from autoshard.core.errors import InputError
from autoshard.core.step import StepCollective
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows import fused
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.engine.rows.torch_rows import half_at_random
from autoshard.runtime.results import RunRequest
from autoshard.runtime.timing import Part, StepTimer
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.reference import Reference, ReferenceEmbeddings, compare
from autoshard.runtime.training.step import TrainingStep
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

pytestmark = pytest.mark.usefixtures("one_process")

SETTINGS = FusedSettings(learning_rate=0.05)
BATCH_SIZE = 6


@pytest.fixture
def tables():
    features = (Feature(name="a", pooling_factor=1.5), Feature(name="b", pooling_factor=2.0))
    return (
        make.table("t", 40, 8, features=features),
        make.table("u", 30, 12, pooling=Pooling.MEAN),
        make.table("v", 20, 4, optimizer=Optimizer.SGD),
    )


@pytest.fixture
def plan(tables):
    return make.table_wise_plan(tables, [0, 0, 0], world_size=1, batch_size=BATCH_SIZE)


def reference_output(plan, batch):
    return ReferenceEmbeddings(plan.tables, SETTINGS)(batch).pooled_BC


def test_features_come_out_in_the_plans_order(plan):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (0,)).ids
    output_BC = embeddings(batch).pooled_BC
    assert embeddings.feature_names == ["a", "b", "u_f", "v_f"]
    assert embeddings.feature_dims == (8, 8, 12, 4)
    assert torch.allclose(output_BC, reference_output(plan, batch), atol=1e-6)


def as_keyed_jagged(batch, names):
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=names, values=batch.ids_L, lengths=batch.lengths_FB.view(-1))


def test_keyed_jagged_tensors_give_keyed_tensors_and_may_have_another_order(plan):
    from torchrec import KeyedTensor

    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (1,)).ids
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    keyed = as_keyed_jagged(batch, embeddings.feature_names)
    expected_BC = embeddings(batch).pooled_BC
    for ids in (keyed, keyed.permute([2, 0, 3, 1])):
        output = embeddings(ids)
        assert isinstance(output, KeyedTensor)
        assert (output.keys(), output.length_per_key()) == (["a", "b", "u_f", "v_f"], [8, 8, 12, 4])
        assert torch.equal(output.values(), expected_BC)
        assert torch.equal(output["u_f"], expected_BC[:, 16:28])
    with pytest.raises(InputError, match=r'^keys: has no feature "b"'):
        embeddings(keyed.permute([0, 2, 3]))
    for repeated, name in (([0, 1, 2, 3, 1], "b"), ([3, 3, 0, 1, 2], "v_f"), ([2, 1, 2, 3, 0, 0], "u_f")):
        with pytest.raises(InputError, match=rf'^keys: has feature "{name}" more than once'):
            embeddings(keyed.permute(repeated))


@pytest.mark.parametrize("num_samples", [0, BATCH_SIZE])
def test_a_first_batch_without_ids_may_have_another_order(plan, num_samples):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    empty = BatchOfIds(torch.zeros(4, num_samples, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    keyed = as_keyed_jagged(empty, embeddings.feature_names[::-1])
    outputs = [embeddings(embeddings.prefetch(keyed)), embeddings(keyed)]
    embeddings.adopt(replace(plan, shards=tuple(replace(one, exchange=Exchange.ROWS) for one in plan.shards)))
    outputs += [embeddings(keyed), embeddings(embeddings.prefetch(keyed))]
    for output in outputs:
        assert torch.equal(output.values(), torch.zeros(num_samples, 32))


def test_one_key_is_the_ids_of_all_tables_that_share_it():
    from torchrec import KeyedJaggedTensor

    one, two = (
        make.table(name, 40, 8, features=(Feature(name=f"f@{name}", pooling_factor=1.0),)) for name in ("t1", "t2")
    )
    other = make.table("u", 30, 4, features=(Feature(name="x@t1", pooling_factor=1.0),))
    embeddings = ShardedEmbeddings(make.table_wise_plan([one, two, other], [0] * 3, 1, 2), SETTINGS)
    ids_L = torch.tensor([7, 1, 2, 3, 4, 5])
    keyed = KeyedJaggedTensor(keys=["x@t1", "f"], values=ids_L, lengths=torch.tensor([1, 0, 2, 3]))
    output = embeddings(keyed)
    assert output.keys() == ["f@t1", "f@t2", "x@t1"]
    expected = BatchOfIds(torch.tensor([[2, 3], [2, 3], [1, 0]]), torch.cat([ids_L[1:], ids_L[1:], ids_L[:1]]))
    assert torch.equal(output.values(), embeddings(expected).pooled_BC)
    with pytest.raises(InputError, match=r'^keys: has no feature "f@t1"'):
        embeddings(KeyedJaggedTensor(keys=["x@t1"], values=ids_L[:1], lengths=torch.tensor([1, 0])))
    with pytest.raises(InputError, match=r'^keys: has no feature "x@t1"'):
        embeddings(KeyedJaggedTensor(keys=["x", "f"], values=ids_L, lengths=torch.tensor([1, 0, 2, 3])))


@pytest.fixture
def with_inverse():
    """Two samples of a pooled feature and three of a sequence, for four samples of the result."""
    tables = [make.table("p", 40, 8), make.table("s", 30, 4, pooling=Pooling.SEQUENCE)]
    inverse = torch.tensor([[0, 1, 1, 0], [2, 1, 0, 2]])
    batch = BatchOfIds(
        torch.tensor([[1, 1, 0], [1, 0, 2]]), torch.tensor([3, 5, 7, 8, 9]), sizes_F=(2, 3), inverse_FB=inverse
    )
    return make.table_wise_plan(tables, [0, 0], world_size=1, batch_size=3), batch


def test_inverse_indices_are_heeded_whatever_way_a_batch_is_looked_up(with_inverse):
    from torchrec import KeyedJaggedTensor

    plan, batch = with_inverse
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    keyed = KeyedJaggedTensor(
        keys=["p_f", "s_f"],
        values=batch.ids_L,
        lengths=torch.tensor([1, 1, 1, 0, 2]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["p_f", "s_f"], batch.inverse_FB),
    )
    pooled_BC = embeddings.table_state("p").weights_ND[[3, 5, 5, 3]]
    rows_LD = embeddings.table_state("s").weights_ND[[8, 9, 7, 8, 9]]
    for made_of in (lambda ids: ids, embeddings.distribute, embeddings.prefetch):
        embedded = embeddings(made_of(batch))
        assert torch.equal(embedded.pooled_BC, pooled_BC)
        assert torch.equal(embedded.sequences["s_f"], rows_LD)
        pooled, sequences = embeddings(made_of(keyed))
        assert torch.equal(pooled["p_f"], pooled_BC)
        assert torch.equal(sequences["s_f"].values(), rows_LD)
        assert sequences["s_f"].lengths().tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inverse_FB": torch.zeros(2, 4)}, "inverse_indices: must be whole numbers of shape (features, batch), got "),
        ({"inverse_FB": torch.zeros(1, 4).int()}, "inverse_indices: must have one row per feature, 2, got 1"),
        ({"inverse_FB": [[0], [0]]}, "inverse_indices: must be a tensor, got list"),
        ({"sizes_F": (2,)}, "sizes: must be 2 numbers of samples, at most 3 each"),
        ({"sizes_F": (2, 4)}, "sizes: must be 2 numbers of samples, at most 3 each"),
        ({"sizes_F": (None, 3)}, "sizes: must be 2 numbers of samples, at most 3 each"),
        ({"sizes_F": 3}, "sizes: must be 2 numbers of samples, at most 3 each"),
        ({"order": (1, 1)}, "order: must have each of the 2 rows of the lengths once"),
        ({"order": (0,)}, "order: must have each of the 2 rows of the lengths once"),
        ({"order": (None, 0)}, "order: must have each of the 2 rows of the lengths once"),
        ({"order": 1}, "order: must have each of the 2 rows of the lengths once"),
    ],
)
def test_what_a_batch_says_of_its_samples_and_features_is_checked_by_name(with_inverse, changes, said):
    plan, batch = with_inverse
    with pytest.raises(InputError, match=f"^{re.escape(said)}"):
        ShardedEmbeddings(plan, SETTINGS)(replace(batch, **changes))


@pytest.mark.parametrize(
    "rate",
    [None, "fast", -0.1, torch.inf, torch.tensor([0.1, 0.2]), torch.tensor(1j), pytest.param(10**400, id="1e400")],
)
def test_a_learning_rate_that_is_none_is_the_error_of_the_batch(plan, rate):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (0,)).ids
    embeddings.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(InputError, match=r"^learning_rate: must be a number of at least 0, got .* \(in the batch of "):
        embeddings(batch)


PLAIN = (
    make.table("t", 40, 8, features=(Feature(name="a", pooling_factor=1.5), Feature(name="b", pooling_factor=2.0))),
    make.table("u", 30, 12, features=(Feature(name="c", pooling_factor=1.0),), optimizer=Optimizer.SGD),
    make.table("s", 20, 4, features=(Feature(name="d", pooling_factor=1.0),), pooling=Pooling.SEQUENCE),
)
WEIGHTED = tuple(replace(table, weighted=True) for table in PLAIN)


def weighted_batch(plan, number):
    batch = draw_samples(plan.tables, 2, BATCH_SIZE, (number,)).ids
    weights_L = torch.randn(len(batch.ids_L), generator=torch.Generator().manual_seed(number))
    return replace(batch, weights_L=weights_L)


def loss_of(embedded):
    return embedded.pooled_BC.square().sum() + embedded.sequences["d"].square().sum()


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
def test_rows_of_weighted_lookups_are_multiplied_and_their_gradients_too(dtype):
    from torchrec import KeyedJaggedTensor

    tables = [replace(table, dtype=dtype) for table in WEIGHTED]
    plan = make.table_wise_plan(tables, [0] * 3, world_size=1, batch_size=BATCH_SIZE)
    other = replace(plan, shards=tuple(replace(one, exchange=Exchange.ROWS) for one in plan.shards))
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    reference, worst = ReferenceEmbeddings(plan.tables, SETTINGS), 0.0
    batches = [weighted_batch(plan, number) for number in range(4)]
    for number, (batch, lookup) in enumerate(embeddings.pipelined(batches)):
        embedded, expected = lookup.wait(), reference(batch)
        worst = max(worst, float((embedded.pooled_BC - expected.pooled_BC).detach().abs().max()))
        assert torch.allclose(embedded.sequences["d"], expected.sequences["d"], atol=2e-3)
        for one, found in ((embeddings, embedded), (reference, expected)):
            loss_of(found).backward()
            one.end_step()
        if number == 1:
            embeddings.adopt(other)
    tolerance = 1e-6 if dtype is DType.FP32 else 3e-2
    assert worst < tolerance
    for table in plan.tables.tables:
        weights_ND = embeddings.table_state(table.name).weights_ND.float()
        assert torch.allclose(weights_ND, reference.weights[table.name], atol=tolerance)
    keyed = KeyedJaggedTensor(
        keys=["a", "b", "c", "d"], values=batch.ids_L, lengths=batch.lengths_FB.view(-1), weights=batch.weights_L
    )
    expected_BC = embeddings(batch).pooled_BC
    # In another order, and where the host reads how many ids a feature has that no table looks up.
    for order in ([2, 0, 3, 1], [3, 0, 1, 2]):
        assert torch.equal(embeddings(keyed.permute(order))[0].values(), expected_BC)
    extra = KeyedJaggedTensor.concat([one_more(batch), keyed])
    assert torch.equal(embeddings(extra)[0].values(), expected_BC)
    with torch.inference_mode():
        assert torch.equal(embeddings(batch).pooled_BC, expected_BC)


def one_more(batch):
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=["other"],
        values=torch.arange(batch.batch_size),
        lengths=torch.ones(batch.batch_size, dtype=torch.int64),
        weights=torch.zeros(batch.batch_size),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: None, "must be there: lookups are weighted"),
        (lambda weights_L: weights_L.double(), "must be one row of float32 numbers, got torch.float64 of "),
        (lambda weights_L: weights_L[:, None], "must be one row of float32 numbers, got torch.float32 of "),
        (lambda weights_L: weights_L[1:], "must be one for each id, "),
        (lambda weights_L: weights_L.tolist(), "must be a tensor, got list"),
        (lambda weights_L: weights_L.to("meta"), "must be on cpu, got meta"),
        (lambda weights_L: weights_L.requires_grad_(), "get no gradients: detach them"),
        (
            lambda weights_L: weights_L.index_fill_(0, torch.tensor(0), torch.inf),
            "must be finite, got inf of feature 'a' ",
        ),
        (
            lambda weights_L: weights_L.index_fill_(0, torch.tensor(18), torch.nan),
            "must be finite, got nan of feature 'b' ",
        ),
    ],
)
def test_weights_that_are_none_are_refused_by_name(change, said):
    plan = make.table_wise_plan(WEIGHTED, [0] * 3, world_size=1, batch_size=BATCH_SIZE)
    embeddings, batch = ShardedEmbeddings(plan, SETTINGS), weighted_batch(plan, 0)
    with pytest.raises(InputError, match=f"^weights: {said}"):
        embeddings(replace(batch, weights_L=change(batch.weights_L.clone())))
    embeddings(batch)


def test_weights_are_refused_where_lookups_are_not_weighted():
    plan = make.table_wise_plan(PLAIN, [0] * 3, world_size=1, batch_size=BATCH_SIZE)
    with pytest.raises(
        InputError, match=r"^weights: lookups are not weighted: leave them out, or plan tables that are weighted"
    ):
        ShardedEmbeddings(plan, SETTINGS)(weighted_batch(plan, 0))


@pytest.mark.parametrize("with_pooled", [False, True])
def test_sequence_tables_give_jagged_tensors(with_pooled):
    tables = [make.table("s", 40, 8, pooling=Pooling.SEQUENCE), make.table("r", 30, 8, pooling=Pooling.SEQUENCE)]
    if with_pooled:
        tables.insert(1, make.table("p", 20, 4))
    plan = make.table_wise_plan(tables, [0] * len(tables), world_size=1, batch_size=BATCH_SIZE)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (6,)).ids
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    keyed = as_keyed_jagged(batch, embeddings.feature_names)
    output = embeddings(keyed.permute(list(reversed(range(len(tables))))))
    expected = embeddings(batch)
    sequences = output[1] if with_pooled else output
    assert list(sequences) == ["s_f", "r_f"]
    for name, jagged in sequences.items():
        assert torch.equal(jagged.values(), expected.sequences[name])
        assert torch.equal(jagged.lengths(), batch.lengths_FB[embeddings.feature_names.index(name)])
    if with_pooled:
        assert torch.equal(output[0]["p_f"], expected.pooled_BC)


def test_gradients_flow_through_keyed_tensors():
    tables = [make.table("s", 40, 8, pooling=Pooling.SEQUENCE), make.table("p", 30, 8)]
    plan = make.table_wise_plan(tables, [0, 0], world_size=1, batch_size=BATCH_SIZE)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (7,)).ids
    keyed_embeddings, embeddings = ShardedEmbeddings(plan, SETTINGS), ShardedEmbeddings(plan, SETTINGS)
    keyed, jagged = keyed_embeddings(as_keyed_jagged(batch, embeddings.feature_names))
    (keyed["p_f"].square().sum() + jagged["s_f"].values().square().sum()).backward()
    expected = embeddings(batch)
    (expected.pooled_BC.square().sum() + expected.sequences["s_f"].square().sum()).backward()
    untrained = ReferenceEmbeddings(plan.tables, SETTINGS)
    for name in ("s", "p"):
        weights_ND = keyed_embeddings.table_state(name).weights_ND
        assert torch.equal(weights_ND, embeddings.table_state(name).weights_ND)
        assert not torch.equal(weights_ND, untrained.weights[name])


def test_half_precision_weights_train():
    table = make.table("t", 40, 8, dtype=DType.FP16)
    plan = make.table_wise_plan([table], [0], world_size=1, batch_size=BATCH_SIZE)
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (2,)).ids
    before = embeddings.table_state("t").weights_ND.clone()
    embeddings(batch).pooled_BC.square().mean().backward()
    reference = ReferenceEmbeddings(plan.tables, SETTINGS)
    reference(batch).pooled_BC.square().mean().backward()
    reference.end_step()
    after = embeddings.table_state("t").weights_ND
    assert after.dtype == torch.float16
    assert not torch.equal(after, before)
    # fp16 keeps 11 bits: 2e-3 covers weights below 1 and a step of 0.05 * sqrt(8).
    assert torch.allclose(after.float(), reference.weights["t"].detach(), atol=2e-3)


def test_an_id_that_is_no_row_is_named(plan):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (3,)).ids
    for bad in (-1, 30):
        ids_L = batch.ids_L.clone()
        first_of_u = int(batch.lengths_FB[:2].sum())
        ids_L[first_of_u] = bad
        with pytest.raises(InputError, match=rf"^feature 'u_f': table 'u' has rows 0 to 29, got id {bad} \(in the "):
            embeddings(BatchOfIds(batch.lengths_FB, ids_L))


def compared(plan, settings, request):
    embeddings = ShardedEmbeddings(plan, settings)
    layers = default_layers(embeddings.feature_dims)
    dense, same_dense = (DenseModel(layers, embeddings.feature_dims, 0) for _ in range(2))
    training = TrainingStep(embeddings, plan.tables, dense, request.learning_rate)
    reference = Reference(plan, same_dense, request, 1)
    return compare(embeddings, training, reference, request, layers.num_dense_features)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (FusedSettings(learning_rate=0.051), "weight_error"),
        (FusedSettings(learning_rate=0.05, eps=1e-3), "weight_error"),
        (FusedSettings(learning_rate=0.05, seed=1), "output_error"),
    ],
)
def test_the_comparison_notices_what_differs(plan, settings, error):
    request = RunRequest(plan_path="none", verify_steps=3, learning_rate=0.05)
    assert compared(plan, SETTINGS, request).max_error <= 5e-6
    assert getattr(compared(plan, settings, request), error) > 1e-4


def test_a_timer_counts_every_part(plan):
    timer = StepTimer(torch.device("cpu"))
    embeddings = ShardedEmbeddings(plan, SETTINGS, timer=timer)
    embeddings(draw_samples(plan.tables, 1, BATCH_SIZE, (5,)).ids).pooled_BC.sum().backward()
    timings = timer.take()
    assert set(timings.parts) == set(Part)
    assert all((milliseconds > 0) == (part is not Part.SYNC) for part, milliseconds in timings.parts.items())
    timed = {one for one, time in timings.collectives.items() if time.serialised_ms > 0 and time.exposed_ms > 0}
    assert timed == {StepCollective.INPUT, StepCollective.FORWARD_EXCHANGE, StepCollective.BACKWARD_EXCHANGE}
    nothing = timer.take()
    assert not any(nothing.parts.values())
    assert {(time.serialised_ms, time.exposed_ms) for time in nothing.collectives.values()} == {(0.0, 0.0)}


def test_the_tables_have_no_parameters_of_the_module(plan):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    assert list(embeddings.parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_trainers_default_dtype_changes_nothing(plan, dtype):
    def trained():
        embeddings = ShardedEmbeddings(plan, SETTINGS)
        state = embeddings.table_state("t")
        # Of a plan that cut the columns: each row's is the mean of the two.
        of_parts_NK = torch.full((40, 2), 1.2345678, dtype=torch.float32)
        embeddings.load_table_state("t", replace(state, moments={"moments": of_parts_NK}))
        batch = draw_samples(plan.tables, 1, BATCH_SIZE, (0,)).ids
        for _ in range(2):
            output_BC = embeddings(batch).pooled_BC
            output_BC.pow(2).sum().backward()
        states = [embeddings.table_state(name) for name in "tuv"]
        return [output_BC, *(one for state in states for one in (state.weights_ND, *state.moments.values()))]

    usual = trained()
    torch.set_default_dtype(dtype)
    try:
        others = trained()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(usual, others, strict=True))


def test_inference_mode_embeds_and_training_goes_on(plan):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    batch = draw_samples(plan.tables, 1, BATCH_SIZE, (0,)).ids
    expected = reference_output(plan, batch)
    kept = embeddings(batch).pooled_BC
    with torch.inference_mode():
        assert torch.allclose(embeddings(batch).pooled_BC, expected, atol=1e-6)
        made_inside = BatchOfIds(batch.lengths_FB.clone(), batch.ids_L.clone())
        assert torch.allclose(embeddings(made_inside).pooled_BC, expected, atol=1e-6)
        assert torch.allclose(embeddings(embeddings.prefetch(batch)).pooled_BC, expected, atol=1e-6)
    kept.pow(2).sum().backward()
    with torch.inference_mode():
        assert not torch.allclose(embeddings(batch).pooled_BC, expected, atol=1e-6)
    embeddings.close()


def test_tables_are_neither_copied_nor_frozen(plan):
    embeddings = ShardedEmbeddings(plan, SETTINGS)
    with pytest.raises(InputError, match="neither copied nor pickled"):
        copy.deepcopy(torch.nn.Sequential(embeddings))
    with pytest.raises(InputError, match="neither copied nor pickled"):
        pickle.dumps(embeddings)
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        embeddings.requires_grad_(False)


def test_rounding_explains_the_error_of_half_precision_weights():
    request = RunRequest(plan_path="none", verify_steps=3, learning_rate=0.05)
    whole, halves = (
        compared(make.table_wise_plan([make.table("t", 40, 8, dtype=dtype)], [0], 1, BATCH_SIZE), SETTINGS, request)
        for dtype in (DType.FP32, DType.FP16)
    )
    assert whole.weight_rounding == 0.0
    # Weights below 0.5: half the gap of 2^-12 for the initial weights, and for each of the steps.
    assert 0.25 <= halves.weight_rounding / 2**-12 <= 2.0
    assert whole.weight_error < halves.weight_error <= halves.weight_rounding


def test_rounding_at_random_keeps_the_mean_and_is_alike_on_all_copies():
    values = torch.tensor([1.0, 1.0 + 2**-12, -3.0 - 2**-10, 1e-3]).repeat(10_000, 1)
    rounded, again = (half_at_random(values, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(rounded, again)
    gaps = torch.tensor([0.0, 2**-10, 2**-9, 2**-20])
    assert ((rounded.float() - values).abs() < gaps.clamp(min=1e-9)).all()
    # Four deviations of the mean of 10,000 numbers, each off by half a gap.
    assert ((rounded.double().mean(dim=0) - values[0]).abs() <= 4 * gaps / 200).all()
    assert not torch.equal(rounded[:, 1], values[:, 1].half())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_precision_weights_are_rounded_at_random_on_a_gpu(device, monkeypatch):
    asked = {}
    monkeypatch.setattr(fused, "fused_embedding", lambda *_, **options: asked.update(options))
    fused.FusedKernel([(10, 4)], DType.FP16, Optimizer.SGD, SETTINGS, torch.device(device))
    assert asked["stochastic_rounding"] == (device == "cuda")
    fused.FusedKernel([(10, 4)], DType.FP32, Optimizer.SGD, SETTINGS, torch.device(device))
    assert not asked["stochastic_rounding"]
