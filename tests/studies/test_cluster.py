"""Clusters of network namespaces: what they are set to, plans on them, and that nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import typer

from autoshard.core import (
    Link,
    PlacedShard,
    Shard,
)
from autoshard.core.errors import DeviceError, ExecutionError, InvalidOptionError
from autoshard.formats import read_topology, write_plan
from autoshard.formats.stores.collective_samples import GroupLevel, Operator
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.processes.launch import LOCAL
from bench.collecting.collection import CollectedSamples
from bench.collecting.options import SampleKind
from studies.cluster.__main__ import main
from studies.cluster.commands import opened_cluster
from studies.cluster.links import fit_links, link_samples, measured_topology
from studies.cluster.network import ClusterSpec, check_support, open_cluster, remove_leftovers
from tests import builders as make

ROOT = Path(__file__).parents[2]
SPEC = ClusterSpec(num_nodes=2, ranks_per_node=2, bits_per_s=4e8)
HOLDER = """
import subprocess, sys, time
from studies.cluster.network import open_cluster
from studies.cluster.network import ClusterSpec
with open_cluster(ClusterSpec(num_nodes=2, ranks_per_node=1, bits_per_s=4e8)) as cluster:
    # Neither the pipe's end nor the session of this process: it stays when this one is killed.
    node = ["ip", "netns", "exec", cluster.namespaces[0]]
    sleeper = subprocess.Popen([*node, "sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
    print(sleeper.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def namespaces():
    """Skips the test where there can be none."""
    try:
        check_support()
    except DeviceError as error:
        pytest.skip(str(error))


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def namespaces_of(pid):
    return [line for line in ip("netns", "list").splitlines() if line.startswith(f"autoshard-{pid}-")]


def links():
    return {link["ifname"] for link in json.loads(ip("-json", "link"))}


def tbf_rates(namespace):
    """Bits per second of shaped interfaces, by name, as `tc` reads them back."""
    shown = subprocess.run(["tc", "-n", namespace, "-s", "-j", "qdisc"], capture_output=True, text=True, check=True)
    return {one["dev"]: one["options"]["rate"] * 8 for one in json.loads(shown.stdout) if one["kind"] == "tbf"}


@contextmanager
def nothing_left():
    before = links()
    yield
    assert namespaces_of(os.getpid()) == []
    assert links() == before


# What a cluster is set to


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_nodes": 0}, "num_nodes: must be a whole number in [1, 250], got 0"),
        ({"num_nodes": 251}, "num_nodes: must be a whole number in [1, 250], got 251"),
        ({"ranks_per_node": 0}, "ranks_per_node: must be a whole number of at least 1, got 0"),
        ({"bits_per_s": 0.0}, "bits_per_s: must be a number in [1e+06, 1e+11], got 0.0"),
        ({"bits_per_s": float("nan")}, "bits_per_s: must be a number in [1e+06, 1e+11], got nan"),
        ({"latency_s": -1.0}, "latency_s: must be a number in [0, 10], got -1.0"),
    ],
)
def test_bad_specs_are_refused(values, text):
    with pytest.raises(InvalidOptionError) as caught:
        ClusterSpec(**{"num_nodes": 2, "ranks_per_node": 2, "bits_per_s": 4e8} | values)
    assert str(caught.value) == text


def test_the_topology_is_what_the_links_are_set_to():
    topology = ClusterSpec(num_nodes=4, ranks_per_node=2, bits_per_s=4e8, latency_s=1e-3).topology()
    assert [(level.name, level.size) for level in topology.levels] == [("node", 2), ("cluster", 8)]
    # 50 MB/s for two ranks; a ring of 8 sends 14/8 of the bytes, through 14 links one after the other.
    assert topology.levels[1].all_to_all == Link(bytes_per_s=25e6, latency_s=1e-3)
    assert topology.levels[1].all_reduce == Link(bytes_per_s=50e6 * 8 / 14, latency_s=14e-3)
    assert [level.shared_links for level in topology.levels] == [False, True]


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "sizes"), [(1, 4, [4]), (3, 1, [1, 3])])
def test_topologies_of_one_node_and_of_nodes_of_one_rank(num_nodes, ranks_per_node, sizes):
    topology = ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node, bits_per_s=4e8).topology()
    assert [level.size for level in topology.levels] == sizes
    assert topology.num_nodes == num_nodes


@pytest.mark.smoke
def test_links_that_a_signal_left_unmeasured_end_the_command_with_its_code(tmp_path, monkeypatch):
    ended = CollectedSamples(kind=SampleKind.COLLECTIVES, device="cpu", is_terminated=True)
    monkeypatch.setattr("studies.cluster.links.collect_collectives", lambda *_, **__: ended)
    monkeypatch.setattr("studies.cluster.network.open_cluster", lambda _: nullcontext(LOCAL))
    with pytest.raises(typer.Exit) as caught, opened_cluster(SPEC) as cluster:
        link_samples(tmp_path, SPEC, (2**13, 2**14), cluster)
    assert caught.value.exit_code == 143


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceError, match="needs the program `ip`: install iproute2"):
        check_support()


@pytest.mark.usefixtures("namespaces")
def test_links_have_the_rate_that_was_set():
    with nothing_left(), open_cluster(SPEC) as cluster:
        for namespace in cluster.namespaces:
            assert tbf_rates(namespace) == {"eth0": 4e8}
        assert tbf_rates(cluster.namespaces[0].removesuffix("-1") + "-switch") == {"port1": 4e8, "port2": 4e8}


@pytest.mark.usefixtures("namespaces")
def test_links_have_the_latency_that_was_set():
    spec = ClusterSpec(num_nodes=2, ranks_per_node=1, bits_per_s=4e8, latency_s=1e-3)
    with nothing_left():
        try:
            with open_cluster(spec) as cluster:
                words = ["tc", "-n", cluster.namespaces[0], "qdisc"]
                shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        except DeviceError as error:
            if "Specified qdisc kind is unknown" not in str(error):
                raise
            shown = None
    if shown is None:
        pytest.skip("this kernel has no netem (sch_netem)")
    assert "netem" in shown
    assert "delay 1ms" in shown


# What is left


@pytest.mark.usefixtures("namespaces")
def test_nothing_is_left_after_an_error_and_clusters_stand_side_by_side():
    def fail():
        with open_cluster(SPEC) as one, open_cluster(SPEC) as other:
            assert not set(one.namespaces) & set(other.namespaces)
            assert len(namespaces_of(os.getpid())) == 6
            raise ZeroDivisionError

    with nothing_left(), pytest.raises(ZeroDivisionError):
        fail()


@contextmanager
def another_process():
    """A process that holds a cluster, with a process on its first node."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        try:
            sleeper = int(holder.stdout.readline())
            assert len(namespaces_of(holder.pid)) == 3
            yield holder, sleeper
        finally:
            holder.kill()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_sigterm_takes_a_cluster_down():
    with another_process() as (holder, sleeper):
        holder.terminate()
        holder.wait()
        assert namespaces_of(holder.pid) == []
        assert not is_alive(sleeper)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_what_a_killed_process_left_is_removed_at_the_next_start():
    with another_process() as (living, _):
        with another_process() as (killed, sleeper):
            killed.kill()
            killed.wait()
            remove_leftovers()
            assert namespaces_of(killed.pid) == []
            assert not is_alive(sleeper)
        assert len(namespaces_of(living.pid)) == 3


# Plans on a cluster


@pytest.fixture
def plan_path(tmp_path):
    tables = tuple(make.table(f"t{index}", 50, 8, pooling_factor=2.5, alpha=1.05) for index in range(4))
    shards = [PlacedShard.table_wise(Shard.whole(table), rank) for rank, table in enumerate(tables)]
    plan = make.plan(*shards, tables=make.tables(*tables, batch_size=8), topology=SPEC.topology())
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def request_of(plan_path, **values):
    return RunRequest(plan_path=str(plan_path), warmup_steps=0, device="cpu", **values)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_plan_runs_on_a_cluster_and_equals_the_unsharded_model(plan_path):
    with nothing_left(), open_cluster(SPEC) as cluster:
        (result,) = run_requests([request_of(plan_path, steps=2, verify_steps=2)], 4, launcher=cluster)
        (interface,) = json.loads(ip("-n", cluster.namespaces[1], "-s", "-j", "link", "show", "eth0"))
    assert (result.num_processes, result.backend, result.folded) == (4, "gloo", False)
    assert result.verification.max_error < 1e-5
    assert interface["stats64"]["tx"]["bytes"] > 10_000  # not over the machine's own loopback


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_the_command_runs_a_plan(plan_path, capsys):
    words = ["--num-nodes", "2", "--ranks-per-node", "2", "--mbit-per-s", "400", "--steps", "2", "--verify-steps", "2"]
    with nothing_left():
        assert main(["run", str(plan_path), *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_processes"], result["device"]) == (4, "cpu")
    assert result["verification"]["max_error"] < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_killed_worker_is_named_and_those_of_other_nodes_end(plan_path):
    killed = []

    def kill(_):
        if not killed:
            pids = ip("netns", "pids", cluster.namespaces[1]).split()
            environments = {pid: Path("/proc", pid, "environ").read_bytes().split(b"\0") for pid in pids}
            killed.extend(int(pid) for pid, words in environments.items() if b"RANK=3" in words)
            os.kill(killed[0], signal.SIGKILL)

    with nothing_left(), open_cluster(SPEC) as cluster:
        with pytest.raises(ExecutionError, match=r"^process 3 was killed by signal 9 \(SIGKILL\)$"):
            run_requests([request_of(plan_path, steps=10**6)], 4, launcher=cluster, on_progress=kill)
        assert [pid for one in cluster.namespaces for pid in ip("netns", "pids", one).split()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_machines_that_are_started_by_themselves_meet_and_restart_after_a_kill(plan_path, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    words = ["--nnodes", "2", "--rdzv", "10.0.0.1:29500", "--steps", "200", "--device", "cpu", "--max-restarts", "1"]
    words += ["--checkpoints", str(tmp_path / "job"), "--checkpoint-every", "20", "--json"]
    command = [str(Path(sys.executable).with_name("autoshard")), "run", str(plan_path), *words]
    with nothing_left(), open_cluster(SPEC) as cluster:
        machines = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--node-rank", str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(folder)},
            )
            for rank, name in enumerate(cluster.namespaces)
        ]
        while not list((tmp_path / "job").glob("step-*")):
            assert [one.poll() for one in machines] == [None, None]
            time.sleep(0.1)
        os.kill(int(next(folder.glob("*/pid.3")).read_text(encoding="utf-8")), signal.SIGKILL)
        said = [one.communicate() for one in machines]
    assert [one.returncode for one in machines] == [0, 0]
    assert "warning: process 3 was killed; restart 1 of 1, on 4 processes" in said[0][1]
    assert "warning: process 3 was killed by signal 9 (SIGKILL); restart 1 of 1, on 4 processes" in said[1][1]
    job = json.loads(said[0][0])["job"]
    assert (job["trained_steps"], job["restarts"], said[1][0]) == (203, 1, "")
    assert job["resumed_from"] >= 20


@pytest.mark.usefixtures("namespaces")
def test_runs_have_as_many_processes_as_the_cluster_has_ranks(plan_path):
    with open_cluster(SPEC) as cluster, pytest.raises(InvalidOptionError, match=r"^nproc: must be 4, the 2 nodes of 2"):
        run_requests([request_of(plan_path)], 2, launcher=cluster)


# Measured links


def sample_of(level, operator, bytes_per_rank, latency_ms):
    return make.collective_sample(make.collective(operator, level, bytes_per_rank), latency_ms=latency_ms)


def test_links_are_fitted_to_bytes_that_leave_or_to_buffers():
    # 2 ms and 1 GB/s of the bytes that count: half of an all-to-all between two ranks leaves.
    sizes = [2**14, 2**16, 2**20]
    samples = [
        *(sample_of(GroupLevel.NODE, Operator.ALL_TO_ALL, size, 2 + size / 2 / 1e6) for size in sizes),
        *(sample_of(GroupLevel.WORLD, Operator.ALL_REDUCE, size, 2 + size / 1e6) for size in sizes),
    ]
    fitted = fit_links(samples)
    assert set(fitted) == {(GroupLevel.NODE, Operator.ALL_TO_ALL), (GroupLevel.WORLD, Operator.ALL_REDUCE)}
    for link in fitted.values():
        assert link.bytes_per_s == pytest.approx(1e9)
        assert link.latency_s == pytest.approx(2e-3)


@pytest.mark.parametrize("latencies_ms", [(1.0, 4.2), (3.0, 2.0)])
def test_links_are_never_negative(latencies_ms):
    samples = [
        sample_of(GroupLevel.NODE, Operator.ALL_REDUCE, size, latency_ms)
        for size, latency_ms in zip((2**14, 2**16), latencies_ms, strict=True)
    ]
    (link,) = fit_links(samples).values()
    assert link.latency_s >= 0
    assert link.bytes_per_s > 0


def test_a_topology_takes_the_links_that_were_measured():
    measured = {
        (GroupLevel.NODE, Operator.ALL_TO_ALL): Link(bytes_per_s=1e6),
        (GroupLevel.ACROSS_NODES, Operator.ALL_TO_ALL): Link(bytes_per_s=2e6),
        (GroupLevel.ACROSS_NODES, Operator.ALL_REDUCE): Link(bytes_per_s=3e6),
        (GroupLevel.WORLD, Operator.ALL_REDUCE): Link(bytes_per_s=4e6),
    }
    node, cluster = measured_topology(SPEC.topology(), measured).levels
    assert (node.all_to_all.bytes_per_s, cluster.all_to_all.bytes_per_s) == (1e6, 2e6)
    assert (node.all_reduce, cluster.all_reduce.bytes_per_s) == (SPEC.topology().levels[0].all_reduce, 4e6)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_the_command_measures_a_topology(tmp_path, capsys):
    output = tmp_path / "topology.json"
    words = ["measure", "--num-nodes", "2", "--ranks-per-node", "1", "--mbit-per-s", "400", "--max-bytes", "65536"]
    with nothing_left():
        assert main([*words, "--store", str(tmp_path / "store"), "-o", str(output), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {(one["level"], one["operator"]) for one in result["links"]} == {
        ("across_nodes", operator.value) for operator in Operator
    }
    topology = read_topology(output)
    assert (topology.world_size, topology.num_nodes) == (2, 2)
    link = next(one for one in result["links"] if one["operator"] == "all_to_all")
    assert topology.levels[1].all_to_all.bytes_per_s == link["bytes_per_s"]
    assert list((tmp_path / "store").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["measure", "-o", "x", "--num-nodes", "1", "--ranks-per-node", "1"], "must be at least 2 ranks in all"),
        (["run", "plan.json", "--nproc", "3"], "nproc: must be left out or 4, got 3"),
        (["run", "plan.json", "--device", "cuda"], "device: must be auto or cpu"),
    ],
)
def test_bad_options_are_refused(words, text, capsys):
    assert main(words) == 2
    assert text in capsys.readouterr().err
