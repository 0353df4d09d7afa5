"""The paper's rule over several tables (Sec. 4.3, 4.5 and 4.6), against rows walked one by one."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import AccessProfile, Feature, Payload, Pooling, Tier
from autoshard.planners.flexshard.equations import Bandwidths, FlexMachine
from autoshard.planners.flexshard.paper_rule import paper_bounds
from tests import builders as make

WORLD, NODE, BATCH, MULTIPLIER, DIM = 8, 4, 64, 6.0, 16
ROW_BYTES = DIM * 4
BANDWIDTHS = Bandwidths(
    all_to_all_global=2e9,
    all_to_all_intra=2e10,
    all_reduce_global=6e9,
    all_reduce_cross=3e9,
)
MACHINE = FlexMachine(ranks_per_node=NODE, num_nodes=WORLD // NODE, local_batch_size=BATCH, bandwidths=BANDWIDTHS)
#: From least to most replicated, as many as a plan has.
TIERS = {2: (Tier.ROW_WISE, Tier.DATA_PARALLEL), 3: (Tier.ROW_WISE, Tier.FLEX, Tier.DATA_PARALLEL)}
#: Memory of a row over row-wise, by Table 2: copies on each rank and on each node, and what a lookup per sample saves.
EACH, EACH_NODE = (MULTIPLIER - 1 / WORLD) * ROW_BYTES, (MULTIPLIER / NODE - 1 / WORLD) * ROW_BYTES
LOOKUP_BYTES = BATCH * ROW_BYTES
#: Probabilities at which tiers are neutral against row-wise in communication, by Table 3.
EACH_NEUTRAL = 1 / (3 * 2 * BATCH)
EACH_NODE_NEUTRAL = 1 / NODE / 3e9 / (2 * BATCH * (1 / 2e9 - 1 / 2e10))


def tables_of(probabilities_by_table):
    """Sequence tables with a knot per row, so that every row is its own."""
    tables = []
    for index, row_p in enumerate(probabilities_by_table):
        length = math.fsum(row_p)
        cumulative = np.r_[0.0, np.cumsum(row_p) / length]
        cumulative[-1] = 1.0
        tables.append(
            make.table(
                f"t{index}",
                len(row_p),
                DIM,
                pooling_factor=length,
                access=AccessProfile(np.arange(len(row_p) + 1.0), cumulative),
                pooling=Pooling.SEQUENCE,
            )
        )
    return tables


def chosen(probabilities_by_table, num_tiers, budget):
    """Rows of each table that are replicated, and those that are replicated or Flex."""
    return bounds_of(tables_of(probabilities_by_table), num_tiers, budget)


def bounds_of(tables, num_tiers, budget):
    return paper_bounds(tables, [TIERS[num_tiers]] * len(tables), MACHINE, Payload(), MULTIPLIER, budget)


def walked(probabilities_by_table, num_tiers, budget):
    """The same, row by row over all tables."""
    merged = sorted(((p, index) for index, row_p in enumerate(probabilities_by_table) for p in row_p), reverse=True)
    replicated, flexed = np.zeros((2, len(probabilities_by_table)), dtype=int)
    used = 0.0
    if num_tiers == 3:
        hot = [(p, index) for p, index in merged if EACH - p * LOOKUP_BYTES <= 0 and p > EACH_NEUTRAL]
        for p, index in hot:  # to point A of Fig. 5
            used += EACH - p * LOOKUP_BYTES
            replicated[index] += 1
        rest = [(p, EACH_NODE, index) for p, index in merged[len(hot) :] if p > EACH_NODE_NEUTRAL]
    else:
        rest = [(p, EACH - p * LOOKUP_BYTES, index) for p, index in merged if p > EACH_NEUTRAL]
    totals = used + np.cumsum([0.0, *(more for _, more, _ in rest)])
    within = np.flatnonzero(totals <= budget)  # to point B
    if not len(within):
        return None
    for _, _, index in rest[: within[-1]]:
        (flexed if num_tiers == 3 else replicated)[index] += 1
    return list(zip(replicated.tolist(), (replicated + flexed).tolist(), strict=True))


row_probabilities = st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=30, unique=True).map(
    lambda drawn: sorted(drawn, reverse=True)
)


@settings(max_examples=60)
@given(
    probabilities=st.lists(row_probabilities, min_size=1, max_size=4),
    num_tiers=st.integers(2, 3),
    # Whole bytes: a budget must not vanish beside the memory that it is added to.
    budget=st.integers(-20_000, 20_000),
)
def test_tables_are_merged_and_cut_row_by_row(probabilities, num_tiers, budget):
    found, expected = chosen(probabilities, num_tiers, budget), walked(probabilities, num_tiers, budget)
    assert (found is None) == (expected is None)
    if found is not None:
        # A budget that a row meets to the last bit may go either way, and rows of one table that are nearly alike
        # may share an interval; both move a bound by one row.
        assert np.abs(np.array(found) - np.array(expected)).max() <= 1


def test_two_tables_share_one_order():
    # Only rows above 6 / 64 save memory: both of the first table, one of the second; the budget pays for one row more,
    # whichever table has the hottest.
    tables = [[0.5, 0.3, 0.01], [0.2, 0.02, 0.015]]
    spare = 3 * EACH - 1.0 * LOOKUP_BYTES
    assert chosen(tables, 2, spare + EACH - 0.02 * LOOKUP_BYTES + 1) == [(2, 2), (2, 2)]
    assert chosen(tables, 2, spare + 2 * EACH - 0.035 * LOOKUP_BYTES + 1) == [(2, 2), (3, 3)]


@pytest.mark.parametrize(("num_tiers", "neutral"), [(2, EACH_NEUTRAL), (3, EACH_NODE_NEUTRAL)])
def test_no_budget_goes_beyond_neutral_communication(num_tiers, neutral):
    # Point C of Fig. 5; with three tiers where Flex is neutral against row-wise (Sec. 4.5).
    row_p = (neutral * np.array([500, 3, 1.01, 0.99, 0.5])).tolist()
    [(replicated, held)] = chosen([row_p], num_tiers, 1e12)
    assert held == 3
    assert replicated == (3 if num_tiers == 2 else 1)


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_tables_that_nobody_looks_up_stay_row_wise(num_tiers):
    feature = Feature(name="f", pooling_factor=0.0)
    [idle] = [replace(table, features=(feature,)) for table in tables_of([[0.5, 0.3]])]
    assert bounds_of([idle], num_tiers, 0) == [(0, 0)]
    assert bounds_of([idle], num_tiers, -1) is None
