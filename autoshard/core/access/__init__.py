"""Access profiles: how often the rows of a table are looked up, as one concave curve."""

from autoshard.core.access.batch import ProfileBatch
from autoshard.core.access.knots import FloatArray, IntArray, log_spaced_ranks
from autoshard.core.access.profile import AccessProfile, mixture
from autoshard.core.access.reuse import NUM_REUSE_BINS, REUSE_BIN_EDGES, REUSE_BIN_MIDDLES

__all__ = [
    "NUM_REUSE_BINS",
    "REUSE_BIN_EDGES",
    "REUSE_BIN_MIDDLES",
    "AccessProfile",
    "FloatArray",
    "IntArray",
    "ProfileBatch",
    "log_spaced_ranks",
    "mixture",
]
