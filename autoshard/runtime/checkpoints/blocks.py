"""Files that go to and come from the disk in blocks, past the system's cache, and are hashed on their way; no torch.

A checkpoint is larger than any cache, and is read again after a failure only. Bytes that go through the cache are
copied into new pages first: 2 GiB took 1.6 to 5.7 s of system time, past the cache 0.2 to 0.3 s (virtual AMD EPYC,
November 2026), on cores that train meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from typing_extensions import Buffer, override

#: Bytes of a file that have one hash, and are read and written at once; the last block has what is left.
BLOCK_BYTES: Final = 1 << 24
#: Blocks of a file being written that are in memory: one that is filled, while others are hashed and written.
_WRITTEN_BLOCKS: Final = 3
#: Blocks of a file being read that are kept: those of a tensor's piece, whose end says where it begins.
_READ_BLOCKS: Final = 9
#: Of those, the blocks that come next.
_AHEAD: Final = 4
#: Where the system's cache is passed by, lengths and places are multiples of it.
_ALIGNMENT: Final = 4096
_LARGE_PAGE_BYTES: Final = 1 << 21
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class HashedWriter(io.RawIOBase):
    """A new file, written in blocks by threads of its own.

    Args:
        path: The file, which must not exist.

    Attributes:
        sha256: Hashes of its blocks, once it is closed: it is on the disk then.

    Raises:
        OSError: If it cannot be made; of writing, in a later call, at the latest in `close`.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._threads = ThreadPoolExecutor(2)
        self._blocks = [_new_block() for _ in range(_WRITTEN_BLOCKS)]
        self._hashed: list[Future[str]] = []
        self._under_way: list[Future[None]] = []
        self._filled, self._passed_on = 0, 0
        self.sha256: tuple[str, ...] = ()

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._passed_on + self._filled

    @override
    def write(self, data: Buffer) -> int:
        """Takes bytes, and returns how many: all of them."""
        given, at = memoryview(data).cast("B"), 0
        while at < len(given):
            if self._filled == BLOCK_BYTES:
                self._pass_on()
            taken = min(len(given) - at, BLOCK_BYTES - self._filled)
            _copy(given[at : at + taken], self._blocks[0][self._filled : self._filled + taken])
            self._filled += taken
            at += taken
        return len(given)

    @override
    def close(self) -> None:
        """Returns when all is hashed and on the disk."""
        if self.closed:
            return
        super().close()
        try:
            if self._filled:
                self._pass_on()
            for one in self._under_way:
                one.result()
            self.sha256 = tuple(one.result() for one in self._hashed)
            os.fsync(self._descriptor)
        finally:
            self._threads.shutdown()
            os.close(self._descriptor)

    def _pass_on(self) -> None:
        """Has the block that was filled hashed and written, and waits for another one to be free."""
        block = self._blocks[0][: self._filled]
        self._hashed.append(self._threads.submit(_hash, block))
        self._under_way.append(self._threads.submit(self._write_at, block, self._passed_on))
        self._passed_on += self._filled
        self._filled = 0
        self._blocks.append(self._blocks.pop(0))
        if (earlier := len(self._under_way) - _WRITTEN_BLOCKS) >= 0:
            self._under_way[earlier].result()
            self._hashed[earlier].result()

    def _write_at(self, block: memoryview, at: int) -> None:
        if len(block) % _ALIGNMENT:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        while block:
            count = os.pwrite(self._descriptor, block, at)
            block, at = block[count:], at + count


class HashedReader(io.RawIOBase):
    """A file that is read in blocks, of which each is hashed before a byte of it is given to anybody.

    The blocks that come next are read and hashed meanwhile, on threads of their own.

    Args:
        path: The file.
        sha256: Hashes that its blocks have to have; none to take them as they are.

    Attributes:
        is_altered: Whether a block was read that has another hash. Who reads on gets an error.

    Raises:
        OSError: If the file cannot be read; in a later call, if a block has another hash.
    """

    def __init__(self, path: Path, sha256: Sequence[str] = ()) -> None:
        self._descriptor = _open(path, os.O_RDONLY)
        self._path, self._sha256, self._at = path, sha256, 0
        self.is_altered = False
        self._size = os.fstat(self._descriptor).st_size
        self._threads = ThreadPoolExecutor(2)
        self._blocks: OrderedDict[int, tuple[memoryview, Future[memoryview]]] = OrderedDict()

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    @override
    def readinto(self, buffer: Buffer) -> int:
        """Reads as many bytes as there is room for, and returns how many: fewer at the file's end only."""
        wanted = memoryview(buffer).cast("B")
        count = max(0, min(len(wanted), self._size - self._at))
        done = 0
        while done < count:
            number, start = divmod(self._at, BLOCK_BYTES)
            part = self._block(number)[start : start + count - done]
            _copy(part, wanted[done : done + len(part)])
            done += len(part)
            self._at += len(part)
        return count

    @override
    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            super().close()
            self._threads.shutdown()
            os.close(self._descriptor)

    def _block(self, number: int) -> memoryview:
        """A block; the next ones are fetched, as far as there are any, and those not used for the longest time go."""
        for one in range(number, min(number + 1 + _AHEAD, -(-self._size // BLOCK_BYTES))):
            if one not in self._blocks:
                if len(self._blocks) == _READ_BLOCKS:
                    _, (memory, oldest) = self._blocks.popitem(last=False)
                    oldest.exception()  # it is read, or could not be
                else:
                    memory = _new_block()
                self._blocks[one] = (memory, self._threads.submit(self._read, one, memory))
            self._blocks.move_to_end(one)
        return self._blocks[number][1].result()

    def _read(self, number: int, memory: memoryview) -> memoryview:
        length, done = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES), 0
        while done < length:
            count = os.preadv(self._descriptor, [memory[done:]], number * BLOCK_BYTES + done)
            if not count:
                raise OSError(errno.EIO, "became shorter while it was read", str(self._path))
            done += count
        if self._sha256 and _hash(memory[:length]) != self._sha256[number]:
            self.is_altered = True
            raise OSError(errno.EIO, "has another hash than when it was written", str(self._path))
        return memory[:length]


def hash_blocks(path: Path) -> tuple[str, ...]:
    """SHA-256 of each block of a file, in hexadecimal digits."""
    return tuple(_hash(block) for block in _blocks_of(path))


def _blocks_of(path: Path) -> Iterator[memoryview]:
    with HashedReader(path) as file:
        memory = _new_block()
        while count := file.readinto(memory):
            yield memory[:count]


def _open(path: Path, flags: int) -> int:
    """Opens a file past the system's cache, or as usual where its file system knows no such thing, as one in memory."""
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)  # some have made it by then
    return os.open(path, flags, 0o666)


def _hash(block: memoryview) -> str:
    return hashlib.sha256(block).hexdigest()


def _copy(source: memoryview, target: memoryview) -> None:
    """Copies bytes, while which other threads run."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _new_block() -> memoryview:
    """Memory that begins where a page does, as direct access wants it, and in few large pages where there are any."""
    memory = mmap.mmap(-1, BLOCK_BYTES + _LARGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    skipped = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % _LARGE_PAGE_BYTES
    return memoryview(memory)[skipped : skipped + BLOCK_BYTES]
