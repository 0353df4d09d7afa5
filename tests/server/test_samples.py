"""Samples that other machines send: checked, added once, or put into quarantine."""

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.api import PARQUET
from autoshard.cli import main
from autoshard.client import Client, ServiceError
from autoshard.core.errors import FormatError
from autoshard.formats.stores.samples import KERNEL_SAMPLES

STORE = Path(__file__).parents[2] / "docs" / "data" / "samples"


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A file of 20 real samples."""
    samples = KERNEL_SAMPLES.read_file(KERNEL_SAMPLES.files(STORE)[0])[:20]
    return KERNEL_SAMPLES.write(tmp_path_factory.mktemp("few") / "store", samples)


@pytest.fixture
def own(own_service, tmp_path):
    data = tmp_path / "data"
    service = own_service("--data", str(data), "--workers", "1")
    with Client(service.url) as client:
        yield service, client, data


def listed(service):
    with service.client() as client:
        return client.get("/v1/samples").json()


def test_samples_are_added_once(own, few, capfd):
    service, client, data = own
    assert listed(service) == {"samples": [], "quarantined": []}
    assert client.send_samples(few) == client.send_samples(few) == 20
    added = KERNEL_SAMPLES.read(data / "samples")
    assert added == KERNEL_SAMPLES.read_file(few)
    kept = {"kind": "kernels", "device": "cpu", "num_samples": 20, "owners": ["anybody"]}
    assert listed(service)["samples"] == [kept]
    for file in (data / "samples").rglob("*.json"):  # as of samples that a job measured
        file.unlink()
    assert listed(service)["samples"] == [{**kept, "owners": []}]
    assert main(["samples", str(few.parents[1]), "--send-to", service.url]) == 0
    assert "Sent 20 samples" in capfd.readouterr().out
    assert len(list((data / "samples").rglob("*.parquet"))) == 1
    assert not list((data / "quarantine").iterdir())


def hostile(few, tmp_path):
    """Contents that are no samples of this version, by what is said of them."""
    content = few.read_bytes()
    table = pq.read_table(few)
    other = tmp_path / "other.parquet"
    column = table.column_names.index("device")
    for name, devices in (("of one device", ["../../etc"] * 20), ("of one device", ["cpu"] * 19 + ["h200"])):
        values = pa.array(devices, table.schema.field("device").type)
        pq.write_table(table.set_column(column, table.schema.field("device"), values), other)
        yield name, other.read_bytes()
    forward = table.column_names.index("forward_ms") if "forward_ms" in table.column_names else None
    assert forward is not None
    pq.write_table(table.set_column(forward, table.schema.field("forward_ms"), pa.array([1e-3] * 20)), other)
    yield "do not match their id", other.read_bytes()
    pq.write_table(table.drop_columns(["device"]), other)
    yield "column is missing", other.read_bytes()
    pq.write_table(pa.concat_tables([table] * 1001), other)
    yield "must hold 1 to 20,000 samples", other.read_bytes()
    yield "no Parquet file, or is damaged", content[: len(content) // 2]
    yield "no Parquet file, or is damaged", b""
    yield "no Parquet file, or is damaged", pickle.dumps(ValueError())


@pytest.mark.slow
def test_what_is_no_file_of_samples_is_kept_apart(own, few, tmp_path):
    service, _, data = own
    found = list(hostile(few, tmp_path))
    with service.client() as http:
        for said, content in found:
            answer = http.post("/v1/samples", content=content, headers={"content-type": PARQUET})
            assert answer.status_code in (400, 422), (said, answer.text)
            assert said in answer.json()["detail"], (said, answer.text)
        json_body = http.post("/v1/samples", content=few.read_bytes(), headers={"content-type": "application/json"})
        assert json_body.status_code == 415
    assert not (data / "samples").exists()
    quarantined = listed(service)["quarantined"]
    # Of what cannot be read at all, nothing is kept.
    assert len(quarantined) == len({content for said, content in found if "is damaged" not in said})
    assert {file.suffix for file in (data / "quarantine").iterdir()} == {".json", ".parquet"}
    for one in quarantined:
        assert json.loads((data / "quarantine" / f"{one['id']}.json").read_text())["detail"] == one["detail"]


def test_the_client_says_what_is_wrong(service, few, tmp_path):
    damaged = tmp_path / "part-0.parquet"
    damaged.write_bytes(few.read_bytes()[:-100])
    with Client(service.url) as client, pytest.raises((FormatError, ServiceError), match="is damaged"):
        client.send_samples(damaged)
