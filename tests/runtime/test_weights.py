"""Initial weights do not depend on who holds them."""

import math
from dataclasses import replace

import pytest
import torch

from autoshard.core import DType, PlacedShard, Shard, Split, Tier
from autoshard.core.batches import coprime_step
from autoshard.runtime.engine.holdings import HeldRange, holdings_of
from autoshard.runtime.engine.rows import places
from autoshard.runtime.weights import CHUNK_ROWS, initial_chunk, initial_chunks, initialise
from tests import builders as make


def drawn(table, seed=0, dtype=torch.float32):
    weights_ND = torch.full((table.num_embeddings, table.embedding_dim), math.nan, dtype=dtype)
    initialise(weights_ND, table, seed)
    return weights_ND


def test_every_row_is_drawn_within_its_bound():
    rows = CHUNK_ROWS + 100
    weights_ND = drawn(make.table("t", rows, 4))
    bound = 1 / math.sqrt(rows)
    assert weights_ND.abs().max() <= bound
    # A uniform draw in [-b, b] has mean 0 and deviation b / sqrt(3); five deviations of the mean of N numbers.
    assert abs(weights_ND.mean()) < 5 * bound / math.sqrt(3 * weights_ND.numel())
    assert abs(weights_ND.std() / (bound / math.sqrt(3)) - 1) < 0.02


def test_name_and_seed_decide_and_nothing_else():
    weights_ND = drawn(make.table("t"))
    assert torch.equal(weights_ND, drawn(make.table("t")))
    assert not torch.equal(weights_ND, drawn(make.table("u")))
    assert not torch.equal(weights_ND, drawn(make.table("t"), seed=1))
    halved = drawn(make.table("t", dtype=DType.FP16), dtype=torch.float16)
    assert torch.equal(halved, weights_ND.half())


@pytest.mark.parametrize("split", list(Split))
def test_a_process_draws_and_looks_at_chunks_that_it_may_have_rows_of(split, monkeypatch):
    table = make.table("t", 40 * CHUNK_ROWS, 4)
    placed = PlacedShard(shard=Shard.whole(table), tier=Tier.ROW_WISE, replicas=(tuple(range(64)),), split=split)
    plan = replace(make.table_wise_plan([table], [0], world_size=64, batch_size=64), shards=(placed,))
    [holding] = holdings_of(plan, 64)
    drawn, looked_at, located = [], [], places.located
    monkeypatch.setattr(
        places, "initial_chunk", lambda of, start, seed: drawn.append(start) or initial_chunk(of, start, seed)
    )
    monkeypatch.setattr(places, "located", lambda *of: looked_at.append(of) or located(*of))
    weights_ND = torch.full((holding.num_rows(5), 4), math.nan)
    places.initialise_held(weights_ND, holding, 5, None, 0)
    # Of a block of 10,240 rows from 51,200 on, chunk 3 is the first and the last; rows that are dealt lie in all.
    assert drawn == [CHUNK_ROWS * chunk for chunk in ([3] if split is Split.BLOCK else range(40))]
    assert len(looked_at) == len(drawn)
    if split is Split.BLOCK:
        assert torch.equal(weights_ND, initial_chunk(table, 3 * CHUNK_ROWS, 0)[51_200 - 3 * CHUNK_ROWS :][:10_240])


@pytest.mark.parametrize("num_rows", [3_030_000_001, 3_100_000_000, 10**10, 2**40])
def test_hashed_rows_of_large_tables_are_a_permutation(num_rows):
    step = coprime_step(num_rows)
    assert math.gcd(step, num_rows) == 1
    assert step * (num_rows - 1) < 2**63
    ids_L = torch.arange(num_rows - 1000, num_rows)
    rows = HeldRange(start=0, stop=num_rows, split=Split.HASH, replicas=(range(num_rows),), read_by=())
    hashed_L, _ = places.located(rows, ids_L)
    assert hashed_L.tolist() == [row * step % num_rows for row in range(num_rows - 1000, num_rows)]


def test_a_chunk_is_the_same_without_the_others():
    table = make.table("t", 2 * CHUNK_ROWS + 7, 4)
    chunks = dict(initial_chunks(table, 3))
    assert list(chunks) == [0, CHUNK_ROWS, 2 * CHUNK_ROWS]
    assert [len(chunk) for chunk in chunks.values()] == [CHUNK_ROWS, CHUNK_ROWS, 7]
    assert not torch.equal(chunks[0], chunks[CHUNK_ROWS])
    assert torch.equal(torch.cat(list(chunks.values())), drawn(table, 3))
