import hashlib
import os
import random

import pytest

from autoshard.runtime.checkpoints import blocks
from autoshard.runtime.checkpoints.blocks import HashedReader, HashedWriter, hash_blocks

BLOCK = 1 << 13


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)


@pytest.fixture(params=["disk", "memory"])
def path(request, tmp_path):
    """A file on a disk, and on a file system that knows no direct access."""
    if request.param == "disk":
        yield tmp_path / "file"
        return
    file = blocks.Path(f"/dev/shm/autoshard-test-{os.getpid()}")
    yield file
    file.unlink(missing_ok=True)


def written(path, content, cuts):
    """Writes the content in parts, and returns the writer."""
    with HashedWriter(path) as writer:
        for start, stop in zip((0, *cuts), (*cuts, len(content)), strict=True):
            assert writer.write(content[start:stop]) == stop - start
            assert writer.tell() == stop
    return writer


@pytest.mark.parametrize("size", [0, 1, 4_096, BLOCK, BLOCK + 1, 20 * BLOCK, 20 * BLOCK + 5_000])
def test_files_come_back_with_the_hashes_of_their_blocks(path, size):
    content = random.Random(size).randbytes(size)
    writer = written(path, content, sorted(random.Random(1).choices(range(size + 1), k=7)))
    assert path.read_bytes() == content
    expected = [hashlib.sha256(content[at : at + BLOCK]).hexdigest() for at in range(0, size, BLOCK)]
    assert list(writer.sha256) == expected == list(hash_blocks(path))
    with HashedReader(path, writer.sha256) as reader:
        assert reader.read() == content


def test_any_part_is_read_from_any_place(path):
    content = random.Random(0).randbytes(30 * BLOCK + 17)
    writer, places = written(path, content, ()), random.Random(2)
    with HashedReader(path, writer.sha256) as reader:
        for _ in range(200):
            at, count = places.randrange(len(content) + 10), places.randrange(3 * BLOCK)
            reader.seek(at)
            assert reader.read(count) == content[at : at + count]
        assert reader.seek(-17, os.SEEK_END) == 30 * BLOCK
        assert reader.read() == content[-17:]


def test_an_altered_block_is_given_to_nobody_and_the_others_are(path):
    content = random.Random(0).randbytes(12 * BLOCK)
    writer = written(path, content, ())
    with path.open("r+b") as file:
        file.seek(10 * BLOCK + 3)
        file.write(bytes([content[10 * BLOCK + 3] ^ 1]))
    with HashedReader(path, writer.sha256) as reader:
        assert reader.read(3 * BLOCK) == content[: 3 * BLOCK]
        reader.seek(10 * BLOCK - 1)
        with pytest.raises(OSError, match="another hash"):
            reader.read(2)
        assert reader.is_altered
    with HashedReader(path) as reader:
        assert len(reader.read()) == len(content)


def test_a_file_that_is_there_is_not_written_over(path):
    written(path, b"kept", ())
    with pytest.raises(FileExistsError):
        HashedWriter(path)
    assert path.read_bytes() == b"kept"


def test_what_goes_wrong_while_writing_is_told_at_the_latest_when_it_is_closed(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        written(path, bytes(3), ())
