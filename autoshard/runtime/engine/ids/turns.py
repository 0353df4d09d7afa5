"""When the collectives of a batch that is distributed ahead are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


class Turn:
    """Places of a batch's collectives among those of the thread that trains.

    Kernels of NCCL wait for their peers on the GPU. Where processes launch those of several communicators in different
    orders, each GPU may run the one whose peers it keeps out. So there is one order on all processes: the first
    collective of a batch is launched while the training thread is in `let_send`, the others while it is in `let_end`
    and waits for the batch. Two threads launch, but only one of them at a time.

    Args:
        is_ordered: False where collectives do not keep each other out, as on gloo: they are launched at once.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self._may_send, self._has_sent, self._may_end = Event(), Event(), Event()
        if not is_ordered:
            for event in (self._may_send, self._has_sent, self._may_end):
                event.set()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While the distributing thread launches the first collective."""
        self._may_send.wait()
        try:
            yield
        finally:
            self._has_sent.set()

    def ending(self) -> None:
        """Before the distributing thread launches others."""
        self._may_end.wait()

    def fail(self) -> None:
        """Ends the turn of a batch that cannot be sent."""
        self._has_sent.set()

    def let_send(self) -> None:
        """Returns when the first collective has been launched."""
        self._may_send.set()
        self._has_sent.wait()

    def let_end(self) -> None:
        """Lets the distributing thread launch all of them, while the training thread launches none."""
        self._may_send.set()
        self._may_end.set()


#: Of batches that nobody else's collectives are launched beside.
AT_ONCE = Turn(is_ordered=False)
