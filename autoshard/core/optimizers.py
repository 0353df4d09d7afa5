"""Optimizers of embedding tables: what each keeps of a row beside its weights, and the settings of its updates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

from autoshard.core.accepted import FINITE, FINITE_ABOVE_0, FINITE_AT_LEAST_0, Range, check_choice
from autoshard.core.declared import Meaning, check_ranges
from autoshard.core.errors import InvalidOptionError


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
    PARTIAL_ROWWISE_ADAM = "partial_rowwise_adam"
    """Adam with one second moment a row, of the mean of the squared gradient over the row."""
    LAMB = "lamb"
    """Adam whose steps are as long, row by row, as the weights times the learning rate."""
    PARTIAL_ROWWISE_LAMB = "partial_rowwise_lamb"
    """LAMB with one second moment a row."""
    NONE = "none"
    """Rows are only read, as those of quantised models are."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What it keeps of a row, first moments first."""
        return _MOMENTS.get(self, ())

    @property
    def has_decaying_moments(self) -> bool:
        """Whether its moments are decaying means, so that a row that is looked up moves without a gradient, too."""
        return len(self.moments) > 1

    @property
    def divides_by_sums(self) -> bool:
        """Whether it divides by roots of sums of squares, which `ReplicaGroups.moment_scale` divides."""
        return len(self.moments) == 1

    @property
    def scales_by_norms(self) -> bool:
        """Whether its steps are scaled by the norm of the row's weights."""
        return self in (Optimizer.LAMB, Optimizer.PARTIAL_ROWWISE_LAMB)

    def state_bytes_per_row(self, embedding_dim: int) -> int:
        """Bytes of fp32 optimizer state held for one row."""
        return 4 * sum([one.width(embedding_dim) for one in self.moments])

    @property
    def row_moment_bytes(self) -> int:
        """Bytes of those of its moments of which a row has one number."""
        return 4 * sum([one.is_per_row for one in self.moments])


_FIRST, _FIRST_OF_ROWS = Moment("moments", is_per_row=False), Moment("moments", is_per_row=True)
_SECOND, _SECOND_OF_ROWS = Moment("second_moments", is_per_row=False), Moment("second_moments", is_per_row=True)
_MOMENTS: Final = {
    Optimizer.ROWWISE_ADAGRAD: (_FIRST_OF_ROWS,),
    Optimizer.ADAGRAD: (_FIRST,),
    Optimizer.ADAM: (_FIRST, _SECOND),
    Optimizer.PARTIAL_ROWWISE_ADAM: (_FIRST, _SECOND_OF_ROWS),
    Optimizer.LAMB: (_FIRST, _SECOND),
    Optimizer.PARTIAL_ROWWISE_LAMB: (_FIRST, _SECOND_OF_ROWS),
}


class WeightDecayMode(StrEnum):
    """How `weight_decay` shrinks the weights of rows that are looked up."""

    DECOUPLED = "decoupled"
    """By the learning rate times `weight_decay`, beside the step."""
    L2 = "l2"
    """As a part of the gradient, which moments see, too; of row-wise AdaGrad."""


class BadGradients(StrEnum):
    """What is done about a step whose loss, or gradients of embeddings, are not finite on some process."""

    IGNORE = "ignore"
    """Nothing is looked at."""
    ERROR = "error"
    """The job ends, before tables are changed by it."""
    SKIP = "skip"
    """No process changes anything by it, and the next step follows. It counts as a step."""
    CLIP = "clip"
    """What is NaN becomes 0, and what is infinite `max_gradient`."""


_DECAY_RATES: Final = Range(at_least=0, below=1, kind=FINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What the updates of all tables have in common.

    Raises:
        InvalidOptionError: If a number is out of range, or a word none of those accepted.
    """

    learning_rate: Annotated[float, FINITE_AT_LEAST_0, Meaning("Learning rate of the tables; schedules change it.")]
    eps: Annotated[
        float, FINITE_ABOVE_0, Meaning("Added to roots of moments; with 0, rows without a gradient would become NaN.")
    ] = 1e-8
    beta1: Annotated[float, _DECAY_RATES, Meaning("What first moments of Adam and LAMB keep from step to step.")] = 0.9
    beta2: Annotated[float, _DECAY_RATES, Meaning("What their second moments keep from step to step.")] = 0.999
    weight_decay: Annotated[
        float,
        FINITE_AT_LEAST_0,
        Meaning("Decay of rows that are looked up; of row-wise AdaGrad, Adam and LAMB."),
    ] = 0.0
    weight_decay_mode: Annotated[
        WeightDecayMode, Meaning("decoupled, or l2 for row-wise AdaGrad: a part of the gradient.")
    ] = WeightDecayMode.DECOUPLED
    max_gradient: Annotated[
        float | None,
        FINITE_ABOVE_0,
        Meaning("Limit of each number of the gradients of embeddings, which are clipped to it; left out, none."),
    ] = None
    max_norm: Annotated[
        float | None,
        FINITE_ABOVE_0,
        Meaning("Limit of the norm of a row of row-wise AdaGrad after its update; left out, none."),
    ] = None

    on_bad_gradients: Annotated[
        BadGradients,
        Meaning(
            "What is done about steps with a loss or gradients that are not finite: ignore (nothing is looked at), "
            "error, skip (no process is changed by one), or clip (NaN becomes 0, what is infinite max_gradient)."
        ),
    ] = BadGradients.IGNORE

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, words in (("weight_decay_mode", WeightDecayMode), ("on_bad_gradients", BadGradients)):
            check_choice(getattr(self, name), words, name)
            object.__setattr__(self, name, words(getattr(self, name)))
        if self.on_bad_gradients is BadGradients.CLIP and self.max_gradient is None:
            raise InvalidOptionError("clip needs max_gradient", field="on_bad_gradients")

    def moves_without_gradient(self, optimizer: Optimizer) -> bool:
        """Whether a row that is looked up may change although its gradient is 0."""
        return optimizer.has_decaying_moments or self.weight_decay > 0 or self.max_norm is not None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuses settings that an optimizer does not have; their fields say which have them.

        Raises:
            InvalidOptionError: Naming the field and the optimizer.
        """
        rowwise = optimizer is Optimizer.ROWWISE_ADAGRAD
        accepted = "rowwise_adagrad"
        if self.max_norm is not None and not rowwise:
            raise InvalidOptionError(f"is of tables of {accepted} only, got one of {optimizer}", field="max_norm")
        if not self.weight_decay:
            return
        if self.weight_decay_mode is WeightDecayMode.L2 and not rowwise:
            raise InvalidOptionError(
                f"must be decoupled but for tables of {accepted}, got l2 with one of {optimizer}",
                field="weight_decay_mode",
            )
        if not rowwise and not optimizer.has_decaying_moments:
            raise InvalidOptionError(
                f"must be 0 but for tables of {accepted}, Adam and LAMB, got {self.weight_decay:g} with one of "
                f"{optimizer}",
                field="weight_decay",
            )
