"""Starts the processes of a run, follows them, and makes sure that none is left behind; without importing torch.

Those on the CPU of this machine are forked (`forking`), others are torchrun's. torch's launcher is run as a command,
not called (`torch.distributed.launcher`): this process would have to import torch, which adds two seconds to the start,
workers would get no pipe of it whose end tells them that it was killed, and the nodes of a test cluster are network
namespaces, which each take a launcher of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, Protocol

from autoshard.core.accepted import WHOLE, WHOLE_AT_LEAST_1, Range
from autoshard.core.choices import Device
from autoshard.core.errors import AutoshardError, DeviceError, DivergedError, ExecutionError, InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.formats import atomic_write, load_topology, read_plan
from autoshard.runtime.ownership import check_updates, even_share, ownership_of
from autoshard.runtime.processes.heap import KEPT_BYTES
from autoshard.runtime.processes.job import ERROR_FILE, JOB_FILE, RESULTS_FILE, STOP_FILE, ErrorRecord, worker_pids
from autoshard.runtime.result_json import RUN
from autoshard.runtime.results import RunRequest, RunResult

DEFAULT_TIMEOUT_S = 3600.0
#: Processes import torch and find each other before their first document; on a busy machine that takes a minute, and
#: longer where more than so many start on a core.
START_S, _STARTED_ON_A_CORE = 300.0, 8
#: How long workers get to end by themselves before they are killed.
_GRACE_S = 5.0
_POLL_S = 0.1
#: Files of GPUs, which CUDA opens.
_DEVICES, _GPUS = Path("/dev"), "nvidia[0-9]*"
_WORKER: Final = "autoshard.runtime.processes.worker"
_FORKING: Final = "autoshard.runtime.processes.forking"
#: Asks Linux for the address of a network interface, see netdevice(7).
_SIOCGIFADDR: Final = 0x8915
#: Time for the last lines of launchers that have ended, and for all processes to end once one has failed.
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is: steps done and steps in total, over all its requests, warm-up included.

    Where the end of files of samples decides, the total is an estimate.
    """

    done: int
    total: int


OnProgress = Callable[[RunProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """That the processes of a run are started again.

    Attributes:
        error: Why they ended.
        number: How often that has happened, with this time.
        nproc: How many start now.
    """

    error: ExecutionError
    number: int
    nproc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """One torchrun of a run: its processes share a node.

    Attributes:
        options: How it finds the others, and how many processes it starts.
        prefix: Words before its command, such as `ip netns exec NAME`.
        variables: Environment variables of its processes, beside those of this one.
        program: Its command before the options: torchrun, or what takes its place.
    """

    options: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    program: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run")
    variables: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """The nodes that a run's processes are started on. They share this machine's processes and file system."""

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """The torchruns that start `nproc` processes together.

        Raises:
            InvalidOptionError: If the nodes do not run as many.
        """
        ...


class LocalLauncher:
    """Starts all processes on this machine with torchrun, as one node; they talk over its loopback interface."""

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """One torchrun."""
        # What --standalone does, but on the loopback address, whatever the host's name resolves to.
        address = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        variables = {"GLOO_SOCKET_IFNAME": interface} if sys.platform == "linux" else {}
        return [Torchrun(options=(*address, f"--nproc-per-node={nproc}"), variables=variables)]


class ForkingLauncher:
    """Starts all processes on this machine from one that has imported what they need, see `forking`."""

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """One program in the place of torchrun."""
        (local,) = LocalLauncher().torchruns(nproc)
        program = (sys.executable, "-m", _FORKING)
        return [replace(local, options=(str(nproc),), program=program)]


LOCAL: Launcher = LocalLauncher()
#: For CPUs.
FORKED: Launcher = ForkingLauncher()

_RENDEZVOUS: Final = re.compile(r"(.+):(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLauncher:
    """Starts this machine's processes of a run on several machines, on each of which it is called.

    Each start of processes meets at another port, the next one, so that no process meets those of the start before.

    Attributes:
        nnodes: Machines.
        node_rank: Number of this one.
        rdzv: Where they meet: address of the machine of number 0, and a port, `HOST:PORT`.

    Raises:
        InvalidOptionError: If a number is out of range, or there is no such address.
    """

    nnodes: int
    node_rank: int
    rdzv: str
    _starts: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        WHOLE_AT_LEAST_1.check_fields(self, "nnodes")
        Range(at_least=0, at_most=self.nnodes - 1, kind=WHOLE).check_fields(self, "node_rank")
        if _RENDEZVOUS.fullmatch(self.rdzv) is None:
            raise InvalidOptionError(f"must be HOST:PORT, got {shown(self.rdzv)}", field="rdzv")

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """This machine's torchrun, with gloo on the interface that leads to the machine of number 0."""
        if nproc % self.nnodes:
            raise InvalidOptionError(f"must be a multiple of the {self.nnodes} machines, got {nproc}", field="nproc")
        host, port = self.rdzv.rsplit(":", 1)
        own = _address_towards(host, int(port))
        options = (
            f"--nnodes={self.nnodes}",
            f"--node-rank={self.node_rank}",
            f"--nproc-per-node={nproc // self.nnodes}",
            f"--master-addr={host}",
            f"--master-port={int(port) + next(self._starts)}",
            f"--local-addr={own}",
        )
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or _interface_of(own)
        return [Torchrun(options=options, variables={"GLOO_SOCKET_IFNAME": interface} if interface else {})]


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that another one sees.

    Raises:
        InvalidOptionError: If the name or address is not known, or no network leads there.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.connect((host, port))  # sends nothing
            return str(found.getsockname()[0])
    except OSError as error:
        raise InvalidOptionError(f"cannot be reached: {error.strerror or error}: {host}", field="rdzv") from error


def _interface_of(address: str) -> str | None:
    """The network interface that has an address; None if that cannot be told."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def run_requests(
    requests: Sequence[RunRequest],
    nproc: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress | None = None,
    launcher: Launcher = LOCAL,
    max_restarts: int = 0,
    least_nproc: int | None = None,
    on_restart: Callable[[Restart], None] | None = None,
    stop: threading.Event | None = None,
    rounds: int = 1,
) -> tuple[RunResult, ...]:
    """Executes plans on processes of this machine, on the same processes: one request after the other, or in rounds.

    Starting processes takes seconds, and times measured in the same processes compare better.

    A process that is killed, hangs or fails ends all of them, within half a minute. They are then started again, if
    that is wanted, and a request with checkpoints goes on from the last one.

    Args:
        requests: What to execute.
        nproc: Number of processes, at most the ranks of each plan; with fewer, rank r runs on process `r % nproc`.
        timeout_s: Time for the whole run.
        on_progress: Called in this process after every step.
        launcher: Starts the processes, on nodes other than this machine if it likes; left out, processes of this
            machine's CPU are forked from one that has imported what they need.
        max_restarts: How often processes are started again after one failed; errors of input, and training that has
            diverged, are final.
        least_nproc: Each restart has one process less, down to so many; None for as many as before.
        on_restart: Called before a restart.
        stop: Once it is set, requests with checkpoints are saved and all of them end.
        rounds: How often each request makes its steps, of which medians are taken over all rounds. With several, the
            requests take turns, so that a machine whose speed changes slows all of them down alike; all of them are in
            memory then, and none may be a job.

    Returns:
        What each request measured; nothing where process 0 runs on another machine.

    Raises:
        InputError: If a plan or its options cannot be executed.
        DeviceError: If this machine lacks the memory or the GPUs.
        ExecutionError: If a process fails, in one line that names it, or time runs out.
    """
    for request in requests:
        for count in range(least_nproc or nproc, nproc + 1):
            _check(request, count)
    if len({request.virtual_time for request in requests}) > 1:
        raise InvalidOptionError("must be that of all requests of a launch, or of none", field="virtual_time")
    WHOLE_AT_LEAST_1.check(rounds, "rounds")
    if rounds > 1 and any(request.is_job for request in requests):
        raise InvalidOptionError("must be 1 for training jobs", field="rounds")
    if launcher is LOCAL and _run_on_cpu(requests):
        launcher = FORKED
    job = {"requests": [asdict(request) for request in requests], "rounds": rounds}
    deadline = time.monotonic() + timeout_s
    restarts = 0
    while True:
        try:
            with running_workers(_WORKER, job, nproc, timeout_s=timeout_s, launcher=launcher, stop=stop) as run:
                folder, documents = run
                for document in documents:
                    progress = _progress(document)
                    if progress is not None and on_progress is not None:
                        on_progress(progress)
                file = folder / RESULTS_FILE
                results = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else []
                break
        except DivergedError:
            raise
        except ExecutionError as error:
            timeout_s = deadline - time.monotonic()
            if restarts == max_restarts or timeout_s <= 0 or (stop is not None and stop.is_set()):
                raise
            restarts += 1
            nproc = max(least_nproc or nproc, nproc - 1)
            if on_restart is not None:
                on_restart(Restart(error=error, number=restarts, nproc=nproc))
    return tuple(_restarted(RUN.from_json(result), restarts) for result in results)


def _run_on_cpu(requests: Sequence[RunRequest]) -> bool:
    """Whether processes of this machine get no GPU, as far as can be told without torch; only Linux is asked.

    As `devices.choose_device` has it: all requests run on one device, and `cpu` wins.
    """
    wanted = {request.device for request in requests}
    if Device.CPU in wanted or requests[0].virtual_time:
        return sys.platform == "linux"
    return sys.platform == "linux" and Device.CUDA not in wanted and not any(_DEVICES.glob(_GPUS))


def _restarted(result: RunResult, restarts: int) -> RunResult:
    return result if result.job is None else replace(result, job=replace(result.job, restarts=restarts))


@contextmanager
def running_workers(
    module: str,
    job: object,
    nproc: int,
    *,
    timeout_s: float = math.inf,
    stall_timeout_s: float = math.inf,
    path: Sequence[str] = (),
    launcher: Launcher = LOCAL,
    stop: threading.Event | None = None,
) -> Iterator[tuple[Path, Iterator[Any]]]:
    """Starts processes with torchrun; whatever happens, none is left afterwards.

    Args:
        module: What the processes run, with the folder as its argument.
        job: What they read from the folder's `job.json`.
        nproc: Number of processes.
        timeout_s: Time for the whole run.
        stall_timeout_s: Longest silence between two documents of theirs, after the first.
        path: Folders that come first where the processes look for modules.
        launcher: Nodes that they are started on.
        stop: Once it is set, they are told to end: the folder gets a file `stop`.

    Yields:
        The folder that they share, there until the end, and the JSON values that they print. These end when the
        processes do, and raise an ExecutionError if time runs out or a process was killed, and the error of the
        process that failed first if one failed.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-run-") as name:
        folder = Path(name)
        atomic_write(folder / JOB_FILE, json.dumps(job))
        with _Launched() as launched:
            try:
                for torchrun in launcher.torchruns(nproc):
                    launched.add(_start(torchrun, folder, module, path))
                start_s = START_S * max(1.0, nproc / (_STARTED_ON_A_CORE * (os.cpu_count() or 1)))
                yield (
                    folder,
                    _documents(launched, folder, timeout_s, max(start_s, stall_timeout_s), stall_timeout_s, stop),
                )
            finally:
                launched.end()
                _end_workers(folder)


def _check(request: RunRequest, nproc: int) -> None:
    plan = read_plan(request.plan_path)
    if request.virtual_time:
        _check_virtual(request, plan.topology.world_size, nproc)
    try:
        ownership_of(plan, nproc)
        check_updates(plan.tables, request)
        if not request.is_job:
            even_share(request.batch_size or plan.tables.batch_size, nproc)
    except InvalidOptionError:
        raise
    except AutoshardError as error:
        raise error.in_source(request.plan_path) from None
    if request.data_path is not None:
        from autoshard.formats.sample_files import open_samples  # pyarrow is for those who read files

        files, dense = open_samples(Path(request.data_path)), plan.tables.dense
        files.check(plan.tables, files.num_dense if dense is None else dense.num_dense_features)


def _check_virtual(request: RunRequest, world_size: int, nproc: int) -> None:
    """Refuses a number of processes, and a topology, that are not the plan's.

    Raises:
        DeviceError: If this system has no virtual time.
        InvalidOptionError: If that is so.
    """
    if sys.platform != "linux":
        raise DeviceError(f"virtual time needs Linux, this is {sys.platform}")
    if nproc != world_size:
        raise InvalidOptionError(
            f"must be left out or {world_size} in virtual time, a process for each rank, got {nproc}", field="nproc"
        )
    if request.topology_path is not None:
        of_wire = load_topology(request.topology_path).world_size
        if of_wire != world_size:
            raise InvalidOptionError(
                f"must have the plan's {world_size} ranks, {shown(request.topology_path)} has {of_wire}",
                field="topology",
            )


class _Launched(ExitStack):
    """The torchruns of a run, which end together."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed_at = math.inf

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Takes in one that has started."""
        self._processes.append(self.enter_context(process))

    @property
    def streams(self) -> list[IO[bytes]]:
        """Their standard outputs."""
        return [process.stdout for process in self._processes if process.stdout]

    @property
    def returncode(self) -> int:
        """Of one that failed; 0 if none has."""
        return next(filter(None, (process.returncode for process in self._processes)), 0)

    def is_running(self) -> bool:
        """Whether documents may follow: some run, and if one failed the others are still about to notice."""
        codes = [process.poll() for process in self._processes]
        if any(codes):
            self._failed_at = min(self._failed_at, time.monotonic())
        return None in codes and time.monotonic() - self._failed_at < _GRACE_S

    def end(self) -> None:
        """Ends those that are left, and waits until they are gone."""
        left = [process for process in self._processes if process.poll() is None]
        for process in left:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


#: Folder that this package lies in.
_LOCATION: Final = Path(__file__).resolve().parents[3]


def _start(torchrun: Torchrun, folder: Path, module: str, path: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [*torchrun.prefix, *torchrun.program, *torchrun.options, "-m", module, str(folder)],
            # Workers inherit it, and end when it does: when this process is gone, however it went.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**_environment(folder, path), **torchrun.variables},
            # Ctrl-C then reaches this process only, which ends the others in order.
            start_new_session=True,
        )


def _environment(folder: Path, path: Sequence[str]) -> dict[str, str]:
    environment = dict(os.environ)
    known = [*path, *filter(None, [environment.get("PYTHONPATH")])]
    if _LOCATION.name not in ("site-packages", "dist-packages"):
        known.append(str(_LOCATION))  # a checkout that nobody has installed
    if known:
        environment["PYTHONPATH"] = ":".join(known)
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name, num_bytes in KEPT_BYTES.items():
        environment.setdefault(name, str(num_bytes))
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{_GRACE_S:.0f}"  # torchrun of torch 2.11 waits for 30 s
    environment["PYTHONSAFEPATH"] = "1"  # or a folder of the user's might stand before a module that workers import
    environment["TMPDIR"] = str(folder)  # torchrun and torch leave files behind, which go with the folder
    return environment


def _documents(
    launched: _Launched,
    folder: Path,
    timeout_s: float,
    start_s: float,
    stall_timeout_s: float,
    stop: threading.Event | None,
) -> Iterator[Any]:
    """JSON values that the workers print, until the launchers end.

    Raises:
        ExecutionError: If they do not end in time, or no process prints any for too long.
        AutoshardError: The error of the process that failed first.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    readers = [threading.Thread(target=_read_lines, args=(one, lines), daemon=True) for one in launched.streams]
    for reader in readers:
        reader.start()
    started = heard = time.monotonic()
    failed_at = math.inf
    limit_s = start_s
    while launched.is_running() or any(reader.is_alive() for reader in readers) or not lines.empty():
        now = time.monotonic()
        if stop is not None and stop.is_set():
            (folder / STOP_FILE).touch()
        if failed_at == math.inf and any(folder.glob(ERROR_FILE.format(rank="*"))):
            failed_at = now
        if now - failed_at > _DRAIN_S:
            _end_workers(folder)  # torchrun would wait for half a minute for one that is stopped
            raise failure(folder, 1)
        if now - started > timeout_s:
            raise ExecutionError(f"the run did not end within {timeout_s:g} s and was stopped")
        if now - heard > limit_s:
            raise ExecutionError(f"no process has answered for {limit_s:g} s; one of them hangs, and all were stopped")
        try:
            document = json.loads(lines.get(timeout=_POLL_S))
        except queue.Empty:
            if not launched.is_running() and now - heard > _DRAIN_S:
                break  # somebody else holds the other end of their output
            continue
        except ValueError:
            continue  # libraries print to standard output, too
        yield document
        heard, limit_s = time.monotonic(), stall_timeout_s
    if launched.returncode != 0:
        raise failure(folder, launched.returncode)


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        lines.put(line)


def _progress(document: Any) -> RunProgress | None:
    try:
        return RunProgress(done=document["done"], total=document["total"])
    except (TypeError, KeyError):
        return None  # libraries print to standard output, too


def _end_workers(folder: Path) -> None:
    """Ends workers that their torchruns left, which live in sessions of their own, and waits until they are gone."""
    deadline = time.monotonic() + _GRACE_S
    while workers := [pid for pid in worker_pids(folder).values() if _signal(pid, 0)]:
        for pid in workers:
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


#: The last line of a traceback.
_RAISED: Final = re.compile(r"(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt)\b")


def failure(folder: Path, returncode: int) -> AutoshardError:
    """The error of the process that failed first, in one line."""
    records = {
        int(file.name.split(".")[1]): ErrorRecord(**json.loads(file.read_text(encoding="utf-8")))
        for file in folder.glob(ERROR_FILE.format(rank="*"))
    }
    stderr = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    killed = [(rank, number) for rank, number in _killed(stderr) if rank not in records and number != signal.SIGTERM]
    told = {record.message for record in records.values() if record.kind == ExecutionError.kind}
    # Its peers only report that it is gone; unless they know of another reason, for which it was ended.
    if killed and (not told or told & {f"process {rank} was killed" for rank, _ in killed}):
        rank, number = killed[0]
        return ExecutionError(f"process {rank} was killed by signal {number} ({_signal_name(number)})")
    if records:
        first = min(records, key=lambda rank: records[rank].time_s)
        return records[first].to_error(first)
    return ExecutionError(f"torchrun ended with {returncode}: {last_words(stderr)}")


def last_words(stderr: str) -> str:
    """What a process that could not even report its error said: the last exception before torchrun's own, or line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" =-*")]
    raised = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
    return (raised or lines or ["it said nothing"])[-1]


def _killed(stderr: str) -> list[tuple[int, int]]:
    """Ranks and signals from torchrun's report."""
    found = re.findall(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-(\d+)", stderr)
    return [(int(rank), int(number)) for rank, number in found]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
