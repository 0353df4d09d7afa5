"""Actors on a Ray cluster."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from autoshard.core.errors import ExecutionError
from autoshard.ray_library import connect, import_ray
from policies.rollout.actors import ActorDiedError, ActorSetup, Order, Played, Player


class RayActors:
    """Starts actors on the cores of a Ray cluster, whose machines have this package installed.

    Args:
        address: Of the cluster: `auto`, `HOST:PORT`, or `local` to start one here that ends with the actors.
        num_actors: How many there will be at a time.
        start_s: Seconds that an actor may wait for a core and start in.

    Raises:
        InvalidOptionError: If Ray is not installed.
    """

    def __init__(self, address: str, num_actors: int, start_s: float = 300.0) -> None:
        self._ray = import_ray()
        self._address, self._num_actors, self._start_s = address, num_actors, start_s
        self._setup: tuple[ActorSetup, Any] | None = None
        self._is_ours = False

    def launch(self, setup: ActorSetup) -> RayActor:
        """Starts one; connects to the cluster first.

        Raises:
            ExecutionError: If there is no cluster at the address, or it has fewer cores than there are to be actors.
        """
        self._connect()
        if self._setup is None or self._setup[0] is not setup:
            self._setup = (setup, self._ray.put(setup))  # stored once, however many actors read it
        return RayActor(self._ray, self._setup[1], self._start_s)

    def close(self) -> None:
        """Leaves the cluster, unless this process was connected to it before."""
        self._setup = None
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _connect(self) -> None:
        ray = self._ray
        if ray.is_initialized():
            return
        connect(ray, self._address, self._num_actors)
        self._is_ours = True
        num_cores = int(ray.cluster_resources().get("CPU", 0))
        if num_cores < self._num_actors:
            self.close()
            raise ExecutionError(
                f"the Ray cluster has {num_cores} cores, fewer than {self._num_actors} actors", source=self._address
            )


class RayActor:
    """An actor of a Ray cluster.

    Args:
        ray: The package.
        setup: Reference to what to play.
        start_s: Seconds that it may wait for a core and start in.
    """

    def __init__(self, ray: ModuleType, setup: Any, start_s: float) -> None:
        self._ray, self._start_s = ray, start_s
        self._player = ray.remote(num_cpus=1, max_restarts=0)(Player).remote(setup)
        self._started: Any = self._player.__ray_ready__.remote()
        self._result: Any = None

    def send(self, order: Order) -> None:
        """Hands over an order; whether the actor is still there shows when the result is asked for."""
        self._result = self._player.play.remote(order)

    def receive(self) -> Played:
        """Waits for what became of the order.

        Raises:
            ActorDiedError: If the actor is gone.
            ExecutionError: If it failed, or found no free core to start on.
        """
        exceptions = self._ray.exceptions
        try:
            if self._started is not None:
                self._ray.get(self._started, timeout=self._start_s)
                self._started = None
            played: Played = self._ray.get(self._result)
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ActorDiedError(str(error).strip().splitlines()[0]) from error
        except exceptions.GetTimeoutError as error:
            raise ExecutionError(
                f"an actor did not start within {self._start_s:g} s: the Ray cluster has no core free for it"
            ) from error
        except exceptions.RayTaskError as error:
            raise ExecutionError(f"an actor failed: {error.cause or error}") from error
        return played

    def close(self) -> None:
        """Ends the actor."""
        self._result = self._started = None
        self._ray.kill(self._player)
