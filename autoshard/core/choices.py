"""What users choose of how plans are priced."""

from enum import StrEnum


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
