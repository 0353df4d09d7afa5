"""Checkpoints of others: TorchRec's, written for real, and plain state dicts."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from autoshard.core import DType, Optimizer, PlacedShard, Pooling, Shard
from autoshard.core.errors import FormatError, InputError
from autoshard.runtime.checkpoints.exchange import export_weights, import_checkpoint
from tests import builders as make
from tests.ranks import on_ranks
from tests.runtime.exchange_worker import DIM, NAMES, NUM_ROWS, load_imported, save_of_torchrec, tables

#: TorchRec keeps no optimizer state of data-parallel tables in its fused optimizer.
WITH_MOMENTS = NAMES[:3]


def plan_of(of):
    return make.plan(*(PlacedShard.table_wise(Shard.whole(one), 0) for one in of), topology=make.topology(2))


@pytest.fixture(scope="module")
def of_torchrec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrec") / "dcp"
    on_ranks(save_of_torchrec, 2, folder)
    return folder


def read_whole(folder, key, shape):
    """As torch.distributed.checkpoint reads it."""
    found = {key: torch.empty(shape)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found[key]


def test_torchrecs_weights_and_moments_are_read_under_any_layout(of_torchrec, tmp_path):
    checkpoint = import_checkpoint(of_torchrec, plan_of(tables(WITH_MOMENTS)), tmp_path, step=7)
    assert checkpoint.verify() == []
    expected = {}
    for name in WITH_MOMENTS:
        weights_ND = read_whole(of_torchrec, f"model.sparse.embedding_bags.{name}.weight", (NUM_ROWS, DIM))
        parts = 2 if name == "column_wise" else 1
        key = f"optim.state.sparse.embedding_bags.{name}.weight.{name}.momentum1"
        moments_NK = read_whole(of_torchrec, key, (parts * NUM_ROWS,)).view(parts, NUM_ROWS).T
        assert moments_NK.any()
        expected[name] = weights_ND, moments_NK.repeat_interleave(DIM // parts, dim=1)
    parts = expected["column_wise"][1]
    assert not torch.equal(parts[:, 0], parts[:, -1])
    on_ranks(load_imported, 2, checkpoint.folder, expected, ("column_wise", "row_wise"))


def test_moments_that_torchrec_lost_are_told_and_begin_at_0_on_request(of_torchrec, tmp_path):
    plan = plan_of(tables())
    with pytest.raises(InputError, match=r"^data_parallel: has no moments in it, and is trained with rowwise_adagrad"):
        import_checkpoint(of_torchrec, plan, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    checkpoint = import_checkpoint(of_torchrec, plan, tmp_path, fresh_moments=True)
    moments = read_whole(checkpoint.folder, "embeddings.tables.data_parallel.moments", (NUM_ROWS,))
    assert torch.equal(moments, torch.zeros(NUM_ROWS))


@pytest.fixture
def bags():
    """A plain module of two tables, one of them of sequences."""
    generator = torch.Generator().manual_seed(0)
    return {
        "sparse.embedding_bags.a.weight": torch.randn(5, 8, generator=generator),
        "sparse.embeddings.b.weight": torch.randn(300, 4, generator=generator).half(),
        "over.weight": torch.zeros(3, 2),
    }


def bags_plan(**fields):
    a = make.table("a", 5, 8, optimizer=Optimizer.SGD)
    b = make.table("b", 300, 4, optimizer=Optimizer.SGD, dtype=DType.FP16, pooling=Pooling.SEQUENCE, **fields)
    return plan_of([a, b])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_plain_state_dicts_are_read_and_written(bags, suffix, tmp_path, monkeypatch):
    # Pieces of two rows.
    monkeypatch.setattr("autoshard.runtime.checkpoints.contents.PIECE_BYTES", 64)
    monkeypatch.setattr("autoshard.runtime.checkpoints.exchange.PIECE_BYTES", 64)
    file = tmp_path / f"state.{suffix}"
    if suffix == "pt":
        torch.save({"model": bags, "epoch": 3}, file)
    else:
        save_file(bags, file)
    checkpoint = import_checkpoint(file, bags_plan(), tmp_path / "checkpoints")
    assert checkpoint.verify() == []
    num_bytes = export_weights(checkpoint, tmp_path / "out.safetensors", prefix="sparse.")
    assert num_bytes == (tmp_path / "out.safetensors").stat().st_size
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == bags.keys() - {"over.weight"}
    for key, tensor in written.items():
        assert torch.equal(tensor, bags[key])


def test_what_does_not_fit_is_refused_by_name(bags, tmp_path):
    file, plan = tmp_path / "state.pt", bags_plan()
    for change, message in (
        ({"sparse.embedding_bags.a.weight": torch.zeros(4, 8)}, r"^a: must be weights of shape \(5, 8\), got \(4, 8\)"),
        ({"sparse.embeddings.b.weight": torch.zeros(300, 4)}, r"^b: must be weights of fp16, got torch.float32"),
        (
            {"other.embedding_bags.a.weight": torch.zeros(5, 8)},
            r"^a: is there 2 times: other.embedding_bags.a.weight, ",
        ),
    ):
        torch.save(bags | change, file)
        with pytest.raises(InputError, match=message):
            import_checkpoint(file, plan, tmp_path / "out")
    del bags["sparse.embedding_bags.a.weight"]
    torch.save(bags, file)
    with pytest.raises(
        InputError, match=r"^a: has no weights in it: must have a key that ends with embedding_bags.a.w"
    ):
        import_checkpoint(file, plan, tmp_path / "out")
    for content in (b"", b"no tensors"):
        for name in ("state.pt", "state.safetensors"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(FormatError, match=rf"{name}: must be a folder of torch.distributed.checkpoint, a "):
                import_checkpoint(tmp_path / name, plan, tmp_path / "out")
    with pytest.raises(FormatError, match="nowhere: is not there"):
        import_checkpoint(tmp_path / "nowhere", plan, tmp_path / "out")
    with pytest.raises(FormatError, match=r"\.metadata: is not there"):
        import_checkpoint(tmp_path, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["state.pt", "state.safetensors", "dcp"])
def test_steps_by_which_moments_are_corrected_are_those_of_the_source(kind, tmp_path):
    def written(state):
        source = tmp_path / str(len(list(tmp_path.iterdir()))) / kind
        source.parent.mkdir()
        if kind == "state.pt":
            torch.save({"model": state}, source)
        elif kind == "dcp":
            with warnings.catch_warnings(action="ignore"):
                dcp.save(state, checkpoint_id=source, no_dist=True)
        else:
            save_file(state, source)
        return source

    def imported(source, **options):
        return import_checkpoint(source, plan, source.parent / "out", **options).step

    plan = plan_of([make.table("a", 5, 8, optimizer=Optimizer.ADAM), make.table("b", 5, 8, optimizer=Optimizer.SGD)])
    a, b = ({f"{module}.tables.{module}.weights": torch.ones(5, 8)} for module in "ab")
    moments = {f"a.tables.a.{name}": torch.ones(5, 8) for name in ("moments", "second_moments")}
    steps = {"a.num_steps": torch.tensor(50)}
    assert imported(written(a | b | moments | steps)) == 50
    with pytest.raises(
        InputError, match=r'^step: must be 50, as in the source: adam corrects the moments of table "a" by'
    ):
        imported(written(a | b | moments | steps), step=49)
    for step in (None, 0):
        with pytest.raises(
            InputError, match=r"^step: must be given \(--step\), and above 0: adam corrects the moments of"
        ):
            imported(written(a | b | moments), step=step)
    assert imported(written(a | b | moments), step=7) == 7
    # Of moments that begin at 0, so does the number.
    assert imported(written(a | b), fresh_moments=True) == 0
    with pytest.raises(InputError, match=r"^step: must be given \(--step\): the source tells 40 and 50"):
        imported(written(a | b | moments | steps | {"b.num_steps": torch.tensor(40)}))
    assert imported(written(a | b | moments | steps | {"b.num_steps": torch.tensor(40)}), step=50) == 50


def test_moments_of_uneven_parts_keep_their_columns(tmp_path):
    table = make.table("a", 5, 8, optimizer=Optimizer.ROWWISE_ADAGRAD)
    state = {
        "tables.a.weights": torch.ones(5, 8),
    }
    for columns, parts in (([0, 2, 8], 2), ([0, 2, 4, 8], 3)):
        state["tables.a.moment_columns"] = torch.tensor(columns)
        state["tables.a.moments"] = torch.arange(5.0 * parts).view(5, parts)
        torch.save(state, tmp_path / "state.pt")
        checkpoint = import_checkpoint(tmp_path / "state.pt", plan_of([table]), tmp_path / str(parts))
        for name in ("moments", "moment_columns"):
            found = {f"embeddings.tables.a.{name}": torch.empty_like(state[f"tables.a.{name}"])}
            with warnings.catch_warnings(action="ignore"):
                dcp.load(found, checkpoint_id=checkpoint.folder, no_dist=True)
            assert torch.equal(found[f"embeddings.tables.a.{name}"], state[f"tables.a.{name}"])
    del state["tables.a.moment_columns"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(InputError, match=r"^a: must be moments of shape \(5,\), got \(5, 3\)"):
        import_checkpoint(tmp_path / "state.pt", plan_of([table]), tmp_path / "refused")
