"""What is made to harm: nothing of it is executed, ends the service, or takes more memory than it may."""

import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core.errors import AutoshardError
from autoshard.formats.imports.table_lists import read_table_list
from costmodel.registry.versions import Registry
from tests.server.test_service_lifecycle import worker_pids

JSON = {"content-type": "application/json"}
TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
MOST_KIB = 64 << 10
NAMES = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    "a/../../b",
    "file:///etc/passwd",
    "\0",
    "..\\..\\x",
    "%2e%2e%2f",
    "~root",
)
HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'"


class Marks:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def zip_bomb():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("data.pkl", "w") as member:
        for _ in range(1024):
            member.write(bytes(1 << 20))
    return content.getvalue()


def parquet_bomb(path, columns, num_rows=50_000_000):
    """A small file of many equal rows."""
    schema = pa.schema(columns)
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=True) as writer:
        for _ in range(num_rows // 1_000_000):
            arrays = [pa.repeat(pa.scalar(1, kind), 1_000_000) for kind in schema.types]
            writer.write_table(pa.table(arrays, schema=schema))
    assert path.stat().st_size < 16 << 20


def hostile_weights(marker):
    """Contents of files that end in .safetensors."""
    tensor = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    nested = b"[" * 100_000
    return {
        "pickle": pickle.dumps(Marks(marker)),
        "header of 2 GiB": struct.pack("<Q", 2 << 30) + b"{}",
        "header of 2^64": struct.pack("<Q", (1 << 64) - 1) + b"{}",
        "tensor of 4 TiB": struct.pack("<Q", len(json.dumps(tensor))) + json.dumps(tensor).encode(),
        "deep header": struct.pack("<Q", len(nested)) + nested,
        "zip bomb": zip_bomb(),
        "nothing": b"",
    }


def bodies():
    """Bodies of requests, by what they are."""
    table = {
        "name": HTML,
        "num_embeddings": 10,
        "embedding_dim": 4,
        "dtype": "fp32",
        "pooling": "sum",
        "features": [{"name": HTML, "pooling_factor": 1.0}],
        "access": {"kind": "uniform"},
    }
    tables = {"schema": "autoshard.tables/1", "batch_size": 64, "tables": [table]}
    yield "html", json.dumps({**TASK, "tables": tables}).encode()
    yield "html planner", json.dumps({**TASK, "planner": HTML}).encode()
    for name in NAMES:
        yield "name of tables", json.dumps({**TASK, "tables": name}).encode()
        yield "name of topology", json.dumps({**TASK, "topology": name}).encode()
        yield "name of planner", json.dumps({**TASK, "planner": name}).encode()
        yield "option", json.dumps({**TASK, "options": {"model": name, name: name}}).encode()
        yield "device", json.dumps({"device": name}).encode()
    for opening in (b"[", b'{"a":', b'{"tables":[', b'{"plan":{"tables":'):
        yield "deep", opening * 100_000
        yield "deep and large", opening * ((8 << 20) // len(opening))
    yield "many keys", b"{" + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}"
    yield "many options", json.dumps({**TASK, "options": {str(number): [] for number in range(100_000)}}).encode()
    yield "long number", b'{"tables":' + b"9" * (4 << 20) + b"}"
    yield "long text", json.dumps({**TASK, "tables": "x" * (8 << 20)}).encode()
    yield "pickle", pickle.dumps(Marks("/tmp/autoshard-must-not-be"))
    yield "zip", zip_bomb()


class MemoryWatch(threading.Thread):
    """Looks at the memory of some processes together every millisecond."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.first_kib = pids, sum(map(resident_kib, pids))
        self.most_kib, self.is_over = self.first_kib, threading.Event()

    def run(self):
        while not self.is_over.wait(0.001):
            self.most_kib = max(self.most_kib, sum(map(resident_kib, self.pids)))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.join()


def resident_kib(pid):
    """Memory of a process; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except FileNotFoundError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") // 1024


#: 415 is that of samples, which are files, and 403 that of keys, of which nobody makes the first.
ANSWERED = (200, 202, 400, 403, 413, 415, 422, 429, 503, 504)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_body_harms_the_service(own_service):
    service = own_service("--workers", "2", "--rate", "100000")
    marker = Path("/tmp/autoshard-must-not-be")
    with service.client() as client, ExitStack() as stack:
        routes = [path for path, verbs in client.get("/openapi.json").json()["paths"].items() if "post" in verbs]
        routes = [path for path in routes if "{" not in path]
        assert len(routes) >= 9
        for _ in range(4):  # each process has planned once
            assert client.post("/v1/plans", json=TASK).status_code == 200
        answered, cut_off = Counter(), []
        watch = stack.enter_context(MemoryWatch([service.process.pid, *worker_pids(service.process.pid)]))
        for name, body in bodies():
            for path in routes:
                try:
                    answer = client.post(path, content=body, headers={**JSON, "Connection": "close"})
                except httpx.TransportError:  # the service may close a connection while a body still comes
                    cut_off.append((name, path))
                    assert client.get("/livez").status_code == 200
                    continue
                assert answer.status_code in ANSWERED, (
                    name,
                    path,
                    answer.text[:300],
                )
                assert answer.headers["content-type"].startswith("application/"), (name, path)
                answered[answer.status_code] += 1
            assert service.process.poll() is None
        assert {200, 400} <= set(answered)
        assert len(cut_off) < answered.total() / 10, cut_off
        assert client.post("/v1/plans", json=TASK).status_code == 200
    assert not marker.exists()
    assert watch.most_kib - watch.first_kib <= MOST_KIB


READ = """
import json, sys
from pathlib import Path
import pyarrow.parquet
from autoshard.core.errors import AutoshardError
from autoshard.formats.imports.table_lists import read_table_list
from costmodel.registry.versions import Registry

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

found = []
for kind, root, name in json.load(sys.stdin):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    try:
        Registry(Path(root)).load("cost", "cpu", name) if kind == "weights" else read_table_list(Path(root, name))
        refused = None
    except AutoshardError as error:
        refused = str(error)
    found.append({"refused": refused, "kib": kib("VmHWM") - before})
print(json.dumps(found))
"""


def read(*files):
    """How another process reads files: what it says of each, and by how much its memory grew."""
    result = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(files), capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def published(root, content, digest_agrees):
    """A registry whose only version has this content for weights."""
    version = Registry(root).publish("cost", "cpu", {"weights": np.zeros(1)}, {"device": "cpu"})
    folder = root / "cost" / "cpu" / version
    weights, card = folder / "weights.safetensors", folder / "card.json"
    if digest_agrees:
        digests = (hashlib.sha256(data).hexdigest() for data in (weights.read_bytes(), content))
        text = card.read_text()
        card.write_text(text.replace(*digests))
        assert card.read_text() != text
    weights.write_bytes(content)
    return "weights", str(root), version


@pytest.mark.slow
def test_no_weights_harm_who_loads_them(tmp_path):
    marker = tmp_path / "executed"
    hostile = hostile_weights(marker)
    for digest_agrees in (False, True):
        folder = tmp_path / str(digest_agrees)
        files = [published(folder / str(number), data, digest_agrees) for number, data in enumerate(hostile.values())]
        for name, found in zip(hostile, read(*files), strict=True):
            assert found["refused"] is not None, name
            assert ("digest is not the one" in found["refused"]) is not digest_agrees, (name, found)
            assert found["kib"] <= MOST_KIB, (name, found)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_name_leaves_the_registry(name, tmp_path):
    for kind, model, version in ((name, "cpu", "production"), ("cost", name, "production"), ("cost", "cpu", name)):
        with pytest.raises(AutoshardError):
            Registry(tmp_path / "registry").load(kind, model, version)


@pytest.mark.slow
def test_a_parquet_bomb_is_refused_row_by_row(tmp_path):
    path = tmp_path / "tables.parquet"
    parquet_bomb(path, [("num_embeddings", pa.int64()), ("embedding_dim", pa.int64())])
    (found,) = read(("tables", str(tmp_path), path.name))
    assert "must have at most" in found["refused"]
    assert found["kib"] <= MOST_KIB, found


@pytest.mark.parametrize("start", [b"", b"PAR1", b"PK\x03\x04"])
def test_an_archive_is_no_list_of_tables(start, tmp_path):
    path = tmp_path / "tables.parquet"
    path.write_bytes(start + pickle.dumps(Marks(tmp_path / "executed")))
    with pytest.raises(AutoshardError):
        read_table_list(path)
    assert not (tmp_path / "executed").exists()
