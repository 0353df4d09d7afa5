"""A training job that is killed, goes on with fewer processes under another plan, follows its data, and finishes.

python examples/surviving_job.py            # on two nodes of the test cluster: needs root and iproute2
python examples/surviving_job.py --local    # on this machine as it is

Everything is done by commands, which are printed; `docs/training.md` shows what they say.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autoshard.core import AccessProfile, EmbeddingTable, Feature, ImpliedOrder, Pooling, TableSet
from autoshard.formats import write_tables, write_topology

sys.path.insert(0, str(Path(__file__).parents[1]))  # `studies` comes with the repository
from studies.cluster.network import ClusterSpec

AUTOSHARD = (str(Path(sys.executable).with_name("autoshard")),)
CLUSTER = (sys.executable, "-m", "studies.cluster")
#: What both parts of the job are started with: other rows are hot from step 60 on, and the plan follows.
JOB = ("--steps", "120", "--drift-every", "60", "--replan-every", "20")
SAVES = ("--checkpoint-every", "30", "--metrics-every", "10")
MBIT_PER_S = 25.0


def main() -> None:
    """Runs the job in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="without the test cluster")
    parser.add_argument("--folder", type=Path, default=Path("surviving-job"), help="where everything goes")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    plans = [planned(folder, ranks_per_node) for ranks_per_node in (3, 2)]

    job = [*JOB, *SAVES, "--checkpoints", str(folder / "job"), "--metrics", str(folder / "metrics")]
    print("\nSix processes, until one of them is killed:", flush=True)
    started = subprocess.Popen(show(run_of(arguments.local, plans[0], 6, job)))
    while len(list((folder / "job").glob("step-*/manifest.json"))) < 1 and started.poll() is None:
        time.sleep(0.2)
    os.kill(workers_of(started.pid)[-1], signal.SIGKILL)
    if started.wait() == 0:
        raise SystemExit("the job should have ended with its process")

    print("\nFour processes go on from the last checkpoint, under a plan for four:", flush=True)
    call(*AUTOSHARD, "checkpoint", "show", str(folder / "job"))
    call(*AUTOSHARD, "checkpoint", "reshard", str(folder / "job"), "--plan", str(plans[1]))
    result = subprocess.run(
        show([*run_of(arguments.local, plans[1], 4, job), "--json"]), check=True, stdout=subprocess.PIPE
    ).stdout
    (folder / "result.json").write_bytes(result)
    print(json.dumps(json.loads(result)["job"], indent=2))


def planned(folder: Path, ranks_per_node: int) -> Path:
    """A plan of sequence tables, whose hot rows slow links are spared, on two nodes."""
    tables = tuple(
        EmbeddingTable(
            name=f"t{number}",
            num_embeddings=200_000,
            embedding_dim=64,
            pooling=Pooling.SEQUENCE,
            features=(Feature(name=f"f{number}", pooling_factor=20.0),),
            access=AccessProfile.zipf(200_000, 1.3),
            row_order=ImpliedOrder.BY_ID,
        )
        for number in range(4)
    )
    spec = ClusterSpec(num_nodes=2, ranks_per_node=ranks_per_node, bits_per_s=MBIT_PER_S * 1e6)
    name = folder / f"tables-{spec.num_ranks}.json"
    write_tables(TableSet(batch_size=512, tables=tables), name)
    topology, plan = name.with_stem(f"topology-{spec.num_ranks}"), name.with_stem(f"plan-{spec.num_ranks}")
    write_topology(spec.topology(), topology)
    call(*AUTOSHARD, "plan", str(name), "--topology", str(topology), "--time-limit", "5", "-o", str(plan))
    return plan


def run_of(is_local: bool, plan: Path, num_processes: int, options: Sequence[str]) -> list[str]:
    """The command that trains: on nodes of two processes each, or on this machine."""
    if is_local:
        return [*AUTOSHARD, "run", str(plan), "--nproc", str(num_processes), "--device", "cpu", *options]
    nodes = ("--num-nodes", "2", "--ranks-per-node", str(num_processes // 2), "--mbit-per-s", str(MBIT_PER_S))
    return [*CLUSTER, "run", str(plan), *nodes, *options]


def call(*command: str) -> None:
    """Prints a command and runs it."""
    subprocess.run(show(command), check=True)


def show(command: Sequence[str]) -> Sequence[str]:
    """Prints a command as one would type it."""
    words = [Path(command[0]).name, *command[1:]]
    print(f"\n$ {shlex.join(words)}", flush=True)
    return command


def workers_of(launcher: int) -> list[int]:
    """Processes that train, of all that a command has started."""
    found, parents = [], {launcher}
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if parent in parents:
            parents.add(int(stat.parent.name))
            if b"autoshard.runtime.processes.worker" in command and b"torch.distributed.run" not in command:
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    main()
