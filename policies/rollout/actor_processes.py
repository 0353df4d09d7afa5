"""Actors as processes of this machine."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from autoshard.core.errors import ExecutionError
from policies.rollout.actors import ActorDiedError, ActorSetup, Order, Played, Player

#: How long an actor gets to end by itself before it is killed.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why an actor could not play."""

    reason: str


class ActorProcesses:
    """Starts actors as processes of this machine.

    A process ends when its pipe does: when it is closed, and also when this process is gone, however it went.
    """

    def __init__(self) -> None:
        # Forked processes would inherit threads of torch and pipes of other actors.
        self._context = multiprocessing.get_context("spawn")

    def launch(self, setup: ActorSetup) -> ActorProcess:
        """Starts one."""
        return ActorProcess(self._context, setup)

    def close(self) -> None:
        """Nothing that they share."""


class ActorProcess:
    """An actor as a process.

    Args:
        context: Starts processes.
        setup: What to play.
    """

    def __init__(self, context: multiprocessing.context.SpawnContext, setup: ActorSetup) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="autoshard-actor", daemon=True)
        # Ctrl-C reaches all processes of a terminal; only the learner is to hear it, which ends the others in order.
        with _interrupts_blocked():
            self._process.start()
        theirs.close()
        # Sent with the first order: until the process is up, the pipe takes little, and others are to start meanwhile.
        self._setup: ActorSetup | None = setup

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def send(self, order: Order) -> None:
        """Hands over an order.

        Raises:
            ActorDiedError: If the process is gone.
        """
        try:
            if self._setup is not None:
                self._connection.send_bytes(pickle.dumps(self._setup))
                self._setup = None
            self._connection.send(order)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Played:
        """Waits for what became of the order.

        Raises:
            ActorDiedError: If the process is gone.
            ExecutionError: If it failed.
        """
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, _Failure):
            raise ExecutionError(f"an actor failed: {answer.reason}")
        assert isinstance(answer, Played)
        return answer

    def _died(self) -> ActorDiedError:
        self._process.join(_GRACE_S)
        return ActorDiedError(f"process {self._process.pid} ended with exit code {self._process.exitcode}")

    def close(self) -> None:
        """Ends the process, and waits until it has ended; an actor may be closed twice."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.terminate()
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(connection: Connection) -> None:
    """Plays orders until the pipe ends."""
    # Whoever sends it anything gets it by its default: a terminated actor just ends.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(EOFError, OSError):  # the learner is gone
        try:
            player = Player(pickle.loads(connection.recv_bytes()))
            while True:
                connection.send(player.play(connection.recv()))
        except (EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - the learner raises it
            connection.send(_Failure(reason=f"{type(error).__name__}: {error}"))


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT here for a moment, and for good in processes that are started meanwhile."""
    resource_tracker.ensure_running()  # the first spawned process would start it, which lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
