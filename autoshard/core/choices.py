"""What users choose of plans and prices: the words, without what is computed by them."""

from enum import StrEnum
from typing import Final

#: Tables that are explained unless told otherwise: those of which a batch reads most bytes.
MOST_EXPLAINED: Final = 50


class Overlap(StrEnum):
    """Which parts of a step run at the same time."""

    NONE = "none"
    """None: collectives block the process (gloo) or the stream (NCCL)."""
    NEO = "neo"
    """The bottom perceptron hides behind the lookup and its exchange, the all-reduce behind the backward pass."""
    NEO_PREFETCH = "neo_prefetch"
    """As `NEO`; the next batch's input distribution starts with the top perceptron's forward pass and hides behind
    computation, while the backward exchange and the all-reduce wait for its links."""
    PIPELINED = "pipelined"
    """The next batch's input distribution hides behind the whole step, exchanges behind the bottom perceptron's passes,
    the all-reduce of dense gradients behind the backward pass."""


class Risk(StrEnum):
    """The predicted time that plans are made for: the mean, or the 95th percentile."""

    MEAN = "mean"
    """The predicted values."""
    HIGH = "high"
    """The upper ends of the 90% intervals: the 95th percentiles."""


class GroupLayout(StrEnum):
    """Which ranks of the world make up a replica group.

    `across_nodes`: every `num_groups`-th rank, so that copies of a row sit side by side in one node and meet over
    its fast links; `within_nodes`: consecutive ranks, so that the exchange within a group stays in few nodes.
    """

    ACROSS_NODES = "across_nodes"
    WITHIN_NODES = "within_nodes"


class Lengths(StrEnum):
    """Source of the number of ids per sample."""

    DECLARED = "declared"
    """The features' pooling variance. Without one, whole pooling factors are the length of every sample, and others
    lie between both neighbours."""
    POISSON = "poisson"
    """As declared, but Poisson where no variance is."""


class Engine(StrEnum):
    """What executes the embedding part of a step."""

    THIN = "thin"
    """autoshard's own engine on torch.distributed and FBGEMM."""
    TORCHREC = "torchrec"
    """TorchRec's DistributedModelParallel."""


class Device(StrEnum):
    """Where something runs; `auto` is CUDA where every process gets a GPU of its own, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class BadIds(StrEnum):
    """What becomes of ids in samples that no table has a row for."""

    ERROR = "error"
    """The job ends, with the feature's name."""
    CLIP = "clip"
    """They become the nearest row: the first or the last."""
    IGNORE = "ignore"
    """They are left out of their bags."""
    SKIP = "skip"
    """Their samples are left out, as samples without a loss."""


class Alias(StrEnum):
    """Names of a trained model's versions: the one that is used by default, and one that is tried out."""

    PRODUCTION = "production"
    CANDIDATE = "candidate"
