"""The compiled search, and the compiled game of the policy, as the dynamic loader knows them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import AutoshardError
from autoshard.core.step import EMBEDDING_PARTS

#: Doubles that are worked on together; arrays over ranks are padded to a multiple of them, and aligned to their bytes.
LANES = 4
_INTEGERS = (
    "num_items",
    "num_ranks",
    "padded_ranks",
    "num_levels",
    "num_launches",
    "node_size",
    "max_shards",
    "num_synced",
)
#: What no call changes, and what calls change in place.
_READ = {
    **dict.fromkeys(("first_option_i", "first_shard_o", "type_o", "kind_e", "holders_e"), np.int32),
    **dict.fromkeys(("allowed_e", "first_site_i"), np.int32),
    **dict.fromkeys(("may_o", "is_shared_e", "in_node_e", "is_free_e", "allowed"), np.uint8),
    **dict.fromkeys(("served_vp", "shared_vp", "sync_v", "bytes_vm", "weight_p"), np.float64),
    "launches_vk": np.int32,
}
_CHANGED = {
    "launch_kp": np.float64,
    **dict.fromkeys(("option_i", "site", "won_o"), np.int32),
    **dict.fromkeys(("load_pr", "free_mr"), np.float64),
    "count_kr": np.int32,
}
_NUMBERS: dict[str, type[ctypes.c_double] | type[ctypes.c_uint64]] = {
    **dict.fromkeys(("sync_ms", "sync_base_ms", "deadline_s"), ctypes.c_double),
    "seed": ctypes.c_uint64,
}
#: The same of `Decode`. Weights are those of the network by their names; its first layers come as what options and
#: items add to them.
_DECODE_INTEGERS = (
    *("num_episodes", "num_items", "num_ranks", "num_levels", "node_size", "max_shards"),
    *("option_hidden", "option_last_width", "place_hidden"),
)
_DECODE_READ = {
    **dict.fromkeys(("order_i", "first_option_i", "first_shard_o", "holders_e", "allowed_e"), np.int32),
    **dict.fromkeys(("first_site_i", "witness_option_i", "witness_site"), np.int32),
    **dict.fromkeys(("is_shared_e", "in_node_e", "allowed"), np.uint8),
    **dict.fromkeys(("own_em", "all_e", "load_ep", "sync_e", "capacity_rm", "room_rm"), np.float64),
    **dict.fromkeys(("mean_p", "weight_p", "left_n"), np.float64),
    **dict.fromkeys(("option_ou", "option_state_nu", "option_context"), np.float32),
    **dict.fromkeys(("option_second", "option_second_bias", "option_last"), np.float32),
    **dict.fromkeys(("place_of_place", "place_state_nu", "place_context", "place_last"), np.float32),
}
_DECODE_CHANGED = dict.fromkeys(("option_ei", "site_ey"), np.int32)
_DECODE_NUMBERS: dict[str, type[ctypes.c_double] | type[ctypes.c_uint64]] = {
    "unit_ms": ctypes.c_double,
    "seed": ctypes.c_uint64,
}
_C_NAMES = {
    np.int32: "int32_t",
    np.uint8: "uint8_t",
    np.float32: "float",
    np.float64: "double",
    ctypes.c_double: "double",
    ctypes.c_uint64: "uint64_t",
}


class Mode(IntEnum):
    """What a call of the compiled search does."""

    DESCEND = 0
    """A descent of all items."""
    LAUNCH_BY_LAUNCH = 1
    """For each launch, all items that use it are held without it, or, if there are none, all may use it for once."""
    RUIN = 2
    """Rounds of ruin and recreate."""


class _OfArrays(ctypes.Structure):
    """Numbers and arrays that C works on, field by field."""

    arrays: ClassVar[Mapping[str, Any]]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], **numbers: float) -> Self:
        """Reads arrays, which have to be kept as long as it is used."""
        for name, dtype in cls.arrays.items():
            assert arrays[name].dtype == dtype, name
            assert arrays[name].flags.c_contiguous, name
        return cls(**numbers, **{name: arrays[name].ctypes.data for name in cls.arrays})


class Task(_OfArrays):
    """What `search.c` works on."""

    arrays: ClassVar[Mapping[str, Any]] = {**_READ, **_CHANGED}
    _fields_ = (
        *((name, ctypes.c_int32) for name in _INTEGERS),
        *((name, ctypes.c_void_p) for name in arrays),
        *_NUMBERS.items(),
    )


class Decode(_OfArrays):
    """What `decode.c` works on."""

    arrays: ClassVar[Mapping[str, Any]] = {**_DECODE_READ, **_DECODE_CHANGED}
    _fields_ = (
        *((name, ctypes.c_int32) for name in _DECODE_INTEGERS),
        *((name, ctypes.c_void_p) for name in arrays),
        *_DECODE_NUMBERS.items(),
    )


def _struct(
    name: str,
    integers: Sequence[str],
    read: Mapping[str, Any],
    changed: Mapping[str, Any],
    numbers: Mapping[str, Any],
) -> list[str]:
    """A type of C."""
    fields = [f"int32_t {', '.join(integers)};"]
    fields += [f"const {_C_NAMES[dtype]} *{field};" for field, dtype in read.items()]
    fields += [f"{_C_NAMES[dtype]} *{field};" for field, dtype in changed.items()]
    fields += [f"{_C_NAMES[kind]} {field};" for field, kind in numbers.items()]
    return ["typedef struct {", *(f"  {field}" for field in fields), f"}} {name};"]


def header() -> str:
    """What `search.c` includes, made of what is declared here: tasks, games, the parts of a step, and modes."""
    padded = -(-len(EMBEDDING_PARTS) // LANES) * LANES
    lines = [
        "/* Written by `python -m scripts.compiled_header`, of what library.py declares. */",
        "",
        "#include <stdint.h>",
        "",
        f"/* Parts of a step, in this order: {', '.join(EMBEDDING_PARTS)}. */",
        f"enum {{ PARTS = {len(EMBEDDING_PARTS)}, LANES = {LANES}, PADDED_PARTS = {padded} }};",
        "/* What a call does. */",
        f"enum {{ {', '.join(f'{mode.name} = {mode.value}' for mode in Mode)} }};",
        "",
        "/* A layout and what it is changed by; see search.c for the letters. */",
        *_struct("Task", _INTEGERS, _READ, _CHANGED, _NUMBERS),
        "",
        "/* Episodes of the policy's game; see decode.c for the letters. */",
        *_struct("Decode", _DECODE_INTEGERS, _DECODE_READ, _DECODE_CHANGED, _DECODE_NUMBERS),
    ]
    return "\n".join(lines) + "\n"


@cache
def library() -> ctypes.CDLL:
    """The compiled search, for wide vectors if this machine has them.

    Raises:
        AutoshardError: If autoshard was installed without a C compiler.
    """
    plain = loaded("_search")
    if plain is None:
        raise AutoshardError(
            "the planner auto needs its compiled search, and autoshard was installed without a C compiler: install one "
            "(such as gcc) and then autoshard again, or a wheel of it; other planners do without"
        )
    if not plain.autoshard_has_avx2():
        return plain
    return loaded("_search_avx2") or plain


def loaded(name: str) -> ctypes.CDLL | None:
    """The compiled search of one of the two files beside this module; None where it was not made.

    Args:
        name: `_search`, or `_search_avx2` for wider vectors.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"{name}{suffix}")
        if path.exists():
            found = ctypes.CDLL(str(path))
            found.autoshard_improve.restype = ctypes.c_double
            found.autoshard_improve.argtypes = (
                ctypes.POINTER(Task),
                *(ctypes.c_int32,) * 4,
                ctypes.c_double,
            )
            found.autoshard_place.argtypes = (ctypes.POINTER(Task), ctypes.c_void_p, ctypes.c_void_p)
            found.autoshard_decode.argtypes = (ctypes.POINTER(Decode),)
            found.autoshard_states.argtypes = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int32,) * 2, ctypes.c_void_p)
            found.autoshard_states.restype = None
            return found
    return None


def over_ranks(values_xr: NDArray[Any]) -> NDArray[Any]:
    """Values of ranks, padded with zeros and aligned; shape (X, padded ranks)."""
    num_rows, num_ranks = values_xr.shape
    shape = (max(1, num_rows), -(-num_ranks // LANES) * LANES)
    size, alignment = values_xr.itemsize * shape[0] * shape[1], LANES * 8
    raw = np.zeros(size + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    padded = raw[start : start + size].view(values_xr.dtype).reshape(shape)
    padded[:num_rows, :num_ranks] = values_xr
    return padded
