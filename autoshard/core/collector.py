"""Python's garbage collector, where it is in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the collector out of code that is timed, or that makes many objects which all stay.

    Of the latter it looks at all that were made so far, again and again: it took a quarter of the time in which the
    options of 160 tables are worked out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
