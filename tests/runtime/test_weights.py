"""Initial weights do not depend on who holds them."""

import math

import torch

from autoshard.core import DType
from autoshard.runtime.weights import CHUNK_ROWS, initial_chunks, initialise


def drawn(table, seed=0, dtype=torch.float32):
    weights_ND = torch.full((table.num_embeddings, table.embedding_dim), math.nan, dtype=dtype)
    initialise(weights_ND, table, seed)
    return weights_ND


def test_every_row_is_drawn_within_its_bound(make_table):
    rows = CHUNK_ROWS + 100
    weights_ND = drawn(make_table("t", rows, 4))
    bound = 1 / math.sqrt(rows)
    assert weights_ND.abs().max() <= bound
    # A uniform draw in [-b, b] has mean 0 and deviation b / sqrt(3); five deviations of the mean of N numbers.
    assert abs(weights_ND.mean()) < 5 * bound / math.sqrt(3 * weights_ND.numel())
    assert abs(weights_ND.std() / (bound / math.sqrt(3)) - 1) < 0.02


def test_name_and_seed_decide_and_nothing_else(make_table):
    weights_ND = drawn(make_table("t"))
    assert torch.equal(weights_ND, drawn(make_table("t")))
    assert not torch.equal(weights_ND, drawn(make_table("u")))
    assert not torch.equal(weights_ND, drawn(make_table("t"), seed=1))
    halved = drawn(make_table("t", dtype=DType.FP16), dtype=torch.float16)
    assert torch.equal(halved, weights_ND.half())


def test_a_chunk_is_the_same_without_the_others(make_table):
    table = make_table("t", 2 * CHUNK_ROWS + 7, 4)
    chunks = dict(initial_chunks(table, 3))
    assert list(chunks) == [0, CHUNK_ROWS, 2 * CHUNK_ROWS]
    assert [len(chunk) for chunk in chunks.values()] == [CHUNK_ROWS, CHUNK_ROWS, 7]
    assert not torch.equal(chunks[0], chunks[CHUNK_ROWS])
    assert torch.equal(torch.cat(list(chunks.values())), drawn(table, 3))
