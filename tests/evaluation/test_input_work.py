"""What ranks take to split the ids of a batch."""

from dataclasses import replace

import pytest

from autoshard.core import (
    AccessProfile,
    Exchange,
    GradSync,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.evaluation.reader_work import READER_SPEED, reader_ms
from autoshard.whatif.trials import local_topology
from tests.builders import each, everyone, placed, table

LOCAL_BATCH, POOLING, ROWS = 100, 3.0, 1000
#: Seconds of each amount before ids are sent.
SPEED = {name: of_input for name, (of_input, _, _) in READER_SPEED["cpu"].items()}
TABLE = table("t", ROWS, pooling_factor=POOLING, access=AccessProfile.uniform(ROWS))
WHOLE = placed(TABLE)
BLOCKS = replace(WHOLE, tier=Tier.ROW_WISE, replicas=everyone(4))
IN_TURN = replace(BLOCKS, split=Split.CYCLIC)
HALF = replace(Shard.whole(TABLE), rows=RowRange(start=0, stop=ROWS // 2, by=RowsBy.ACCESS_RANK))
LOOKUPS = LOCAL_BATCH * POOLING


def seconds(shard, device="cpu"):
    return reader_ms([shard], LOCAL_BATCH, local_topology(device, 4, 1 << 30))[0, 0] / 1e3


@pytest.mark.parametrize(
    ("shard", "num_lengths", "lookup_s", "num_lookups"),
    [
        (WHOLE, 100, SPEED["lookups"], LOOKUPS),
        (BLOCKS, 400, SPEED["lookups"] + SPEED["cut_lookups"], LOOKUPS),
        (IN_TURN, 400, SPEED["lookups"] + SPEED["cut_lookups"] + SPEED["dealt_lookups"], LOOKUPS),
        (replace(WHOLE, shard=HALF), 100, SPEED["lookups"] + SPEED["cut_lookups"], LOOKUPS / 2),
        (
            replace(IN_TURN, shard=HALF),
            400,
            SPEED["lookups"] + SPEED["cut_lookups"] + SPEED["dealt_lookups"],
            LOOKUPS / 2,
        ),
    ],
    ids=["whole", "blocks", "in turn", "a range on one rank", "a range in turn"],
)
def test_sums_take_lengths_and_lookups(shard, num_lengths, lookup_s, num_lookups):
    assert seconds(shard) == pytest.approx(SPEED["lengths"] * num_lengths + lookup_s * num_lookups)


def test_rows_take_requests_and_matches_in_place_of_lengths():
    rows = replace(IN_TURN, exchange=Exchange.ROWS)
    lookup_s = SPEED["lookups"] + SPEED["cut_lookups"] + SPEED["dealt_lookups"] + SPEED["row_lookups"]
    assert seconds(rows) == pytest.approx(4 * SPEED["requests"] + lookup_s * LOOKUPS)
    once = replace(rows, deduplicate=True)
    assert seconds(once) - seconds(rows) == pytest.approx(SPEED["repeated_lookups"] * LOOKUPS)


def test_copies_of_hot_rows_are_ranges_whose_sums_are_read_in_place():
    copies = replace(
        WHOLE,
        shard=HALF,
        tier=Tier.DATA_PARALLEL,
        replicas=each(4),
        grad_sync=GradSync.SPARSE,
        exchange=Exchange.ROWS,
    )
    lookup_s = SPEED["lookups"] + SPEED["cut_lookups"] + SPEED["dealt_lookups"]
    alone_s = SPEED["lengths"] * LOCAL_BATCH + lookup_s * LOOKUPS / 2
    # All four ranks are told of the distinct rows that a batch hits of them.
    told_s = SPEED["told_rows"] * 4 * HALF.access()[0].expected_distinct(LOOKUPS / 2)
    assert seconds(copies) == pytest.approx(alone_s + told_s)
    assert seconds(replace(copies, grad_sync=GradSync.DENSE)) == pytest.approx(alone_s)


def test_holders_of_a_part_of_copied_rows_hear_of_that_part():
    apart = replace(BLOCKS, tier=Tier.FLEX, replicas=((0, 1), (2, 3)), exchange=Exchange.ROWS, grad_sync=GradSync.DENSE)
    told_s = seconds(replace(apart, grad_sync=GradSync.ALL_GATHER)) - seconds(apart)
    # Two ranks hold each half of the rows, of which all four ranks look up half of theirs.
    assert told_s == pytest.approx(SPEED["told_rows"] * 4 / 2 * TABLE.access.expected_distinct(LOOKUPS))


def test_what_nobody_measured_takes_nothing():
    told = replace(WHOLE, tier=Tier.DATA_PARALLEL, replicas=each(4), grad_sync=GradSync.SPARSE)
    for shard in (IN_TURN, told):
        assert seconds(shard, "a100") == 0
        assert seconds(shard, "cpu:amd-25") == seconds(shard) > 0
