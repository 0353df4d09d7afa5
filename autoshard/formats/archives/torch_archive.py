"""Tensors of a file that `torch.save` wrote, read as data: nothing in the file is imported, called or trusted.

The file is a ZIP archive of raw storages and one small pickle that says which tensors they make. The pickle is not
loaded: its opcodes are walked (`pickle_walk`), and any that tensors do not need is refused. `torch.load` with
`weights_only=True, mmap=True` is no substitute: where a storage is cut short it reads on into what follows, a
description of 60 MB takes it 4 GB and two minutes, and importing torch takes longer than reading the file.
"""

from __future__ import annotations

import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.archives.pickle_walk import PLAIN_OPCODES, Global, walk

T = TypeVar("T")

#: numpy's names of the storages that files of ids hold.
_DTYPES = {
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
    "torch ShortStorage": "<i2",
    "torch FloatStorage": "<f4",
    "torch DoubleStorage": "<f8",
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_NO_HOOKS = "collections OrderedDict"
_ONE_TUPLE = "one tuple of plain tensors"
_MAX_PROGRAM_BYTES = 2**20
_MAX_TENSORS = 64
#: zipfile's list of an archive's members; torch's have 100 bytes for each tensor.
_MAX_READ_BYTES = 2**24

_ARCHIVE_START = b"PK\x03\x04"
_OLD_FORMAT_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LOCAL_HEADER_BYTES = 30

#: What zipfile and zlib raise of archives that contradict themselves: offsets beyond the file, names that are no text,
#: encrypted members, packed data that is none.
_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,  # NotImplementedError is one
    ValueError,  # UnicodeDecodeError is one
)


class _Storage(NamedTuple):
    dtype: object
    key: object
    num_elements: object


class _Tensor(NamedTuple):
    storage: object
    offset: object
    shape: object
    strides: object


def read_tensors(file: BinaryIO) -> tuple[NDArray[np.generic], ...]:
    """The tensors of a tuple that `torch.save` wrote, mapped into memory rather than read.

    Args:
        file: An open file of the file system, which stays open as long as the arrays are used.

    Raises:
        FormatError: If the file is of another format, holds anything but a tuple of contiguous tensors, or is damaged.
    """
    return _in_archive(file, lambda archive: _tensors_of(archive, file))


def read_program(file: BinaryIO, max_bytes: int) -> bytes:
    """The pickle in a file that `torch.save` wrote, as it is.

    Args:
        file: An open file.
        max_bytes: Most bytes that it may have.

    Raises:
        FormatError: If the file is of another format, or damaged.
    """
    at_once = max(max_bytes, _MAX_READ_BYTES)
    return _in_archive(file, lambda archive: _program(archive, _members(archive), max_bytes, "content"), at_once)


def _in_archive(file: BinaryIO, read: Callable[[zipfile.ZipFile], T], max_read_bytes: int = _MAX_READ_BYTES) -> T:
    start = file.read(len(_OLD_FORMAT_START))
    if start == _OLD_FORMAT_START:
        raise FormatError("is in torch's format from before version 1.6; load it and save it again with torch.save")
    if not start.startswith(_ARCHIVE_START):
        raise FormatError("is no file that torch.save wrote")
    try:
        with zipfile.ZipFile(cast(BinaryIO, _BoundedReads(file, max_read_bytes))) as archive:
            return read(archive)
    except FormatError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise FormatError(f"is a damaged archive: {shortened(str(error))}") from None


class _BoundedReads:
    """A file of which no more is read at once than an archive's lists and descriptions take.

    zipfile reads the list of members as a whole, however long a damaged archive says that it is.
    """

    def __init__(self, file: BinaryIO, max_read_bytes: int) -> None:
        self._file, self._max_read_bytes = file, max_read_bytes
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        left = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if (left if size < 0 else min(size, left)) > self._max_read_bytes:
            raise FormatError(f"is a damaged archive: it lists its members in more than {self._max_read_bytes:,} bytes")
        return self._file.read(size)


def _tensors_of(archive: zipfile.ZipFile, file: BinaryIO) -> tuple[NDArray[np.generic], ...]:
    members = _members(archive)
    value = walk(
        _program(archive, members, _MAX_PROGRAM_BYTES, "tensors"),
        accepted=PLAIN_OPCODES,
        reduce=_reduce,
        refer=_storage,
        wanted=_ONE_TUPLE,
        described="its tensors",
    )
    if not isinstance(value, tuple | list) or not 0 < len(value) <= _MAX_TENSORS:
        raise FormatError(f"must hold a tuple of 1 to {_MAX_TENSORS} tensors")
    return tuple(_materialise(tensor, members, file) for tensor in value)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    return {info.filename.partition("/")[2]: info for info in archive.infolist()}


def _program(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], max_bytes: int, what: str) -> bytes:
    program = members.get("data.pkl")
    if program is None:
        raise FormatError("is no file that torch.save wrote: it has no data.pkl")
    if program.file_size > max_bytes:
        raise FormatError(f"must describe its {what} in at most {max_bytes} bytes, got {program.file_size}")
    if "byteorder" in members and members["byteorder"].file_size < 16:
        order = _stored(archive, members["byteorder"])
        if order != b"little":
            raise FormatError(f"must have little-endian numbers, got {shown(order.decode('latin-1'))}")
    return _stored(archive, program)


def _stored(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """A member's bytes. torch packs none, and a packed one may unpack to more than it says."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"must hold a plain {shortened(member.filename)}, got a compressed one")
    return archive.read(member)


def _storage(value: object) -> _Storage:
    if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
        raise FormatError(f"must hold {_ONE_TUPLE} and nothing else, its description has another reference")
    return _Storage(dtype=value[1], key=value[2], num_elements=value[4])


def _reduce(function: object, arguments: object) -> object:
    name = function.name if isinstance(function, Global) else shown(function)
    if name == _NO_HOOKS and arguments == ():
        return None
    if name != _REBUILD:
        raise FormatError(f"must hold {_ONE_TUPLE} and nothing else, its description calls {shortened(name)}")
    if not isinstance(arguments, tuple) or len(arguments) < 4:
        raise FormatError("has a damaged description of its tensors: one has too few parts")
    return _Tensor(*arguments[:4])


def _materialise(tensor: object, members: dict[str, zipfile.ZipInfo], file: BinaryIO) -> NDArray[np.generic]:
    if not isinstance(tensor, _Tensor) or not isinstance(tensor.storage, _Storage):
        raise FormatError("must hold a tuple of tensors, and nothing else")
    storage = tensor.storage
    dtype_name = _DTYPES.get(storage.dtype.name) if isinstance(storage.dtype, Global) else None
    if dtype_name is None:
        raise FormatError(f"must hold whole numbers or fp32 or fp64, got {shortened(str(storage.dtype))}")
    dtype, shape, offset = np.dtype(dtype_name), _sizes(tensor.shape), _sizes((tensor.offset,))[0]
    num_elements = int(np.prod(shape, dtype=object))
    if num_elements > 1 and _sizes(tensor.strides) != _contiguous_strides(shape):
        raise FormatError("must hold contiguous tensors")
    member = members.get(f"data/{storage.key}")
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"has no plain storage {shown(storage.key)}")
    if (offset + num_elements) * dtype.itemsize > member.file_size:
        raise FormatError(f"has a storage {shown(storage.key)} that is smaller than its tensor")
    if num_elements == 0:
        return np.zeros(shape, dtype=dtype)
    return np.memmap(
        file, dtype=dtype, mode="r", offset=_data_start(member, file) + offset * dtype.itemsize, shape=shape
    )


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise FormatError("has a damaged description of its tensors: a size is no whole number")
    return value


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def _data_start(member: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Where a stored member's bytes begin: after its local header, whose variable parts it gives the lengths of."""
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(_ARCHIVE_START):
        raise FormatError("is a damaged archive: a header is missing")
    name_length, extra_length = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return member.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length
