"""Files are written whole or not at all."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autoshard.core.errors import FormatError
from autoshard.formats import atomic_write
from autoshard.formats.files import atomic_create


def test_text_and_bytes_are_written_with_missing_folders(tmp_path):
    target = tmp_path / "new" / "folder" / "file.txt"
    atomic_write(target, "käse")
    assert target.read_bytes() == "käse".encode()
    atomic_write(target, b"\x00")
    assert target.read_bytes() == b"\x00"
    assert list(target.parent.iterdir()) == [target]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "file.txt"
    atomic_write(target, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(target, "half of it, then \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path, monkeypatch):
    target = tmp_path / "file.txt"

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(FormatError, match="cannot be written: no space left on device"):
        atomic_write(target, "new")
    assert list(tmp_path.iterdir()) == []


def test_new_files_have_the_usual_permissions_and_old_ones_keep_theirs(tmp_path):
    target, usual = tmp_path / "file.txt", tmp_path / "usual.txt"
    usual.touch()
    atomic_write(target, "")
    assert target.stat().st_mode == usual.stat().st_mode
    target.chmod(0o640)
    atomic_write(target, "")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "file.txt", tmp_path / "link.txt"
    target.touch()
    link.symlink_to(target)
    atomic_write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("place", ["", "pipe", "file/inside"])
def test_a_place_where_no_file_can_be_is_refused_and_left_alone(tmp_path, place):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="cannot be written") as caught:
        atomic_write(tmp_path / place, "x")
    assert str(tmp_path / place) in str(caught.value)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_name_that_is_too_long_is_an_error_of_that_file(tmp_path):
    with pytest.raises(FormatError, match="cannot be written: file name too long"):
        atomic_write(tmp_path / ("a" * 5000), "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["s3://bucket/plan.json", "gs:/bucket/plan.json", "hdfs://host/plan.json"])
def test_addresses_are_refused_before_a_folder_of_their_name_is_made(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (address, Path(address)):
        with pytest.raises(FormatError, match="must be a file of this machine, got an address"):
            atomic_write(path, "")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_no_file_to_write():
    reading, writing = os.pipe()
    with pytest.raises(FormatError, match="is no regular file"):
        atomic_write(f"/dev/fd/{writing}", "")
    os.close(reading)
    os.close(writing)


def test_of_many_that_make_a_file_one_does(tmp_path):
    target, contents = tmp_path / "a" / "b" / "file", [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda content: atomic_create(target, content, staging=tmp_path), contents))
    assert made.count(True) == 1
    assert target.read_bytes() == contents[made.index(True)]
    assert not atomic_create(target, b"late", staging=tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "file"}


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(FormatError, match="a/file: cannot be written: "):
        atomic_create(tmp_path / "a" / "file", b"", staging=tmp_path)
