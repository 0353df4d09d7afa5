"""Optimizers of embedding tables: what each keeps of a row beside its weights."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Moment(NamedTuple):
    """fp32 numbers that an optimizer keeps: one for each weight, or one for each row."""

    name: str
    """In states of tables and in state dicts: `moments`, and of optimizers with two of them `second_moments`."""
    is_per_row: bool

    def width(self, embedding_dim: int) -> int:
        """Numbers for a row of so many columns."""
        return 1 if self.is_per_row else embedding_dim


class Optimizer(StrEnum):
    """Optimizer of an embedding table; its state counts as memory."""

    SGD = "sgd"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    ADAGRAD = "adagrad"
    ADAM = "adam"
    NONE = "none"
    """Rows are only read, as those of quantised models are."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What it keeps of a row, first moments first."""
        return _MOMENTS.get(self, ())

    def state_bytes_per_row(self, embedding_dim: int) -> int:
        """Bytes of fp32 optimizer state held for one row."""
        return 4 * sum(one.width(embedding_dim) for one in self.moments)


_MOMENTS = {
    Optimizer.ROWWISE_ADAGRAD: (Moment("moments", is_per_row=True),),
    Optimizer.ADAGRAD: (Moment("moments", is_per_row=False),),
    Optimizer.ADAM: (Moment("moments", is_per_row=False), Moment("second_moments", is_per_row=False)),
}
