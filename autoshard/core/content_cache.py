"""Results that are kept by the content of what they are of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class ContentCache(Generic[KeyT, ValueT]):
    """Results by key; those that are new are worked out together, each once.

    Threads may share a cache. Two that ask for the same new key may both work it out.

    Args:
        work_out: Gives the results of some keys, none twice, in their order.
        max_entries: Results that are kept; with more, all but those just asked for are dropped.
    """

    def __init__(self, work_out: Callable[[Sequence[KeyT]], Iterable[ValueT]], *, max_entries: int) -> None:
        self._work_out, self._max_entries = work_out, max_entries
        self._known: dict[KeyT, ValueT] = {}

    def of(self, keys: Sequence[KeyT]) -> list[ValueT]:
        """The results of some keys, in their order."""
        known = self._known
        new = [key for key in dict.fromkeys(keys) if key not in known]
        if new:
            if len(known) + len(new) > self._max_entries:
                # Another dictionary: threads that look up results in the one before still find them.
                known = self._known = {key: known[key] for key in keys if key in known}
            known.update(zip(new, self._work_out(new), strict=True))
        return [known[key] for key in keys]
