"""What is accepted of a number, a seed, a name or a list of names, refused everywhere in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.core.quoting import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers that are accepted; what is no number is not.

    Attributes:
        at_least: Lower bound, itself accepted.
        above: Lower bound, itself refused.
        at_most: Upper bound, itself accepted.
        below: Upper bound, itself refused.
        kind: `a number` refuses infinity as well, `a whole number` all but integers; messages name it.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    kind: str = ""

    def __contains__(self, value: float) -> bool:
        if self.kind == WHOLE and (not isinstance(value, int) or isinstance(value, bool)):
            return False
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and not (isinstance(value, float) and (math.isnan(value) or (self.kind == FINITE and math.isinf(value))))
        )

    def __str__(self) -> str:
        opening, low = ("[", self.at_least) if self.above is None else ("(", self.above)
        high, closing = (self.at_most, "]") if self.below is None else (self.below, ")")
        if high is not None:
            limit = f"in {opening}{_bound(low)}, {_bound(high)}{closing}"
        elif self.above is not None:
            limit = f"above {_bound(low)}"
        else:
            limit = f"of at least {_bound(low)}" if self.kind else f"at least {_bound(low)}"
        return f"{self.kind} {limit}".lstrip()

    def check(self, value: float | None, field: str, error: type[InputError] = InvalidOptionError) -> None:
        """Refuses a number outside of the range; None, for a number that was left out, is accepted.

        Raises:
            InputError: Of the given type, naming the field.
        """
        if value is not None and value not in self:
            got = shown(value) if isinstance(value, int) and not isinstance(value, bool) else value
            raise error(f"must be {self}, got {got}", field=field)

    def check_fields(
        self, owner: object, *names: str, within: str = "", error: type[InputError] = InvalidOptionError
    ) -> None:
        """As `check`, for attributes of an object; `within` comes before their names in messages."""
        for name in names:
            self.check(getattr(owner, name), f"{within}{name}", error)


def _bound(value: float | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


FINITE = "a number"
WHOLE = "a whole number"
AT_LEAST_0 = Range(at_least=0)
AT_LEAST_1 = Range(at_least=1)
ABOVE_0 = Range(above=0)
#: A share of something, above nothing and up to all of it.
SHARE = Range(above=0, at_most=1)
FINITE_AT_LEAST_0 = Range(at_least=0, kind=FINITE)
FINITE_ABOVE_0 = Range(above=0, kind=FINITE)
WHOLE_AT_LEAST_0 = Range(at_least=0, kind=WHOLE)
WHOLE_AT_LEAST_1 = Range(at_least=1, kind=WHOLE)
#: Largest seed that numpy, torch and JSON take alike: numpy's older generators, which Stable-Baselines3 seeds, take no
#: more.
MAX_SEED = 2**32 - 1
SEED = Range(at_least=0, at_most=MAX_SEED)
#: What files may hold: some hundred times what published models have, small enough that bytes fit 64 bits.
MAX_TABLES = 100_000
MAX_ROWS = 2**40
MAX_EMBEDDING_DIM = 2**16
MAX_BATCH_SIZE = 2**31
MAX_POOLING_FACTOR = 1e6
MAX_WORLD_SIZE = 2**17


#: Words of other libraries for what plans do not hold, and the word for what takes as much memory or little more.
_NEAREST = {
    "int2": "int8",
    "int4": "int8",
    "uint4": "int8",
    "fp8": "int8",
    "fp64": "fp32",
    "float64": "fp32",
    "double": "fp32",
    "lars_sgd": "adagrad",
    "ftrl": "adam",
    "rmsprop": "adagrad",
}


def none_of(accepted: Iterable[str], value: object) -> str:
    """What is wrong with a value that is none of some words, and which of them is nearest where one is."""
    names = list(dict.fromkeys(accepted))
    nearest = _NEAREST.get(value.strip().lower()) if isinstance(value, str) else None
    hint = f"; the nearest is {nearest}" if nearest in names else ""
    return f"must be one of {', '.join(names)}, got {shown(value)}{hint}"


def check_choice(value: str, accepted: Iterable[str], field: str) -> None:
    """Refuses a text that is none of those accepted.

    Raises:
        InvalidOptionError: Naming the field and all that is accepted.
    """
    names = list(accepted)
    if value not in names:
        raise InvalidOptionError(none_of(names, value), field=field)


def listed(text: str) -> tuple[str, ...]:
    """The names of a text such as `a, b,c`; an empty name is one, too."""
    return tuple(name.strip() for name in text.split(","))
