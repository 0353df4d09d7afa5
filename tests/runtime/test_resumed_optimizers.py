"""What an optimizer keeps goes along when tables go on under another layout, the number of steps among it."""

from autoshard.core import Optimizer
from autoshard.evaluation.traffic import sync_bytes
from tests.ranks import on_ranks
from tests.runtime.resumed_worker import all_of, plan_of

TRAINED = tuple(one for one in Optimizer if one is not Optimizer.NONE)
LAYOUTS = ("whole", "dealt", "dense", "sparse")


def test_tables_go_on_under_every_layout_as_if_nothing_had_happened():
    (found, keys), synced = on_ranks(all_of, 2, TRAINED, LAYOUTS)[0]
    assert len(found) == len(TRAINED) * len(LAYOUTS) ** 2
    assert max(found.values()) <= 1e-6, found
    for optimizer in TRAINED:
        names = ["num_steps", *sorted(f"tables.t.{one.name}" for one in optimizer.moments), "tables.t.weights"]
        assert keys[optimizer] == names
        # Rows of Adam and LAMB that are looked up move without a gradient, so that a number tells which were.
        [placed] = plan_of(optimizer, "dense", 2).shards
        priced = sync_bytes([placed], 12)[0, 0]
        assert synced[optimizer] == priced == 4 * 30 * (8 + optimizer.has_decaying_moments)
