"""Files of users: only regular ones are read, and their size is looked at first."""

import os
import socket

import pytest

from autoshard.core.errors import FormatError
from autoshard.formats import import_tables, read_json, read_plan, read_tables, read_topology
from autoshard.formats.documents.row_counts import read_row_counts
from autoshard.formats.files import MAX_DOCUMENT_BYTES, read_bytes

READERS = [read_bytes, read_json, read_tables, read_topology, read_plan]


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    return tmp_path / "pipe.json"


@pytest.mark.parametrize("read", READERS)
def test_devices_pipes_sockets_and_folders_are_not_opened(read, pipe, tmp_path, monkeypatch):
    link = tmp_path / "link.json"
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # paths of sockets are short
        server.bind("socket")
        for path, got in ((pipe, "a pipe"), (link, "a device"), (tmp_path / "socket", "a socket")):
            with pytest.raises(FormatError, match=f"must be a regular file, got {got}") as caught:
                read(path)
            assert str(caught.value).startswith(str(path))
    with pytest.raises(FormatError, match="cannot be read: is a directory"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["batch.parquet", "batch.pt", "batch.pt.gz", "config.json"])
def test_nothing_is_imported_from_a_pipe(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match="must be a regular file, got a pipe"):
        import_tables(tmp_path / name)
    with pytest.raises(FormatError, match="must be a regular file, got a pipe"):
        read_row_counts(tmp_path / name)


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(FormatError, match=f"must be at most {MAX_DOCUMENT_BYTES:,} bytes, got 3,298,534,883,328"):
        read_json(path)
    path.write_bytes(b"12345")
    assert read_bytes(path, max_bytes=5) == b"12345"
    with pytest.raises(FormatError, match="must be at most 4 bytes, got 5"):
        read_bytes(path, max_bytes=4)


def test_a_file_that_hides_its_size_is_read_to_the_limit_only():
    with pytest.raises(FormatError, match=r"must be at most 4 bytes$"):
        read_bytes("/proc/self/maps", max_bytes=4)


def test_a_path_that_is_none_is_one_line():
    with pytest.raises(FormatError, match="cannot be read: embedded null byte"):
        read_bytes("a\0b")
