"""What a pickle describes, read as data: nothing in it is imported, called or trusted.

Loaders of pickles with lists of allowed names have been circumvented before, so no pickle is loaded here: its opcodes
are walked, objects become inert records, and opcodes that are not asked for are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened

_LITERALS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "NONE"})
_CONSTANTS: dict[str, object] = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TO_MARK = frozenset({"TUPLE", "APPENDS", "SETITEMS"})

#: Opcodes of tuples of plain values, and of calls.
PLAIN_OPCODES = (
    _LITERALS - {"BINFLOAT"}
    | _CONSTANTS.keys()
    | _TUPLES.keys()
    | {"GLOBAL", "MARK", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "TUPLE", "BINPERSID", "REDUCE", "STOP"}
    | {"PROTO"}
)
#: The same with those of lists, dictionaries and objects.
OBJECT_OPCODES = (PLAIN_OPCODES - {"BINPERSID"}) | {
    *("BINFLOAT", "EMPTY_LIST", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "NEWOBJ", "BUILD"),
    *("STACK_GLOBAL", "MEMOIZE", "FRAME"),
}


class Global(NamedTuple):
    """A name that the pickle would import: module and name with a space between them."""

    name: str


@dataclass(eq=False)
class Record:
    """An object: what it would be made of, its attributes, and its items if it is a dictionary."""

    name: str
    arguments: tuple[object, ...] = ()
    attributes: dict[str, object] = field(default_factory=dict)
    items: dict[object, object] = field(default_factory=dict)


#: Makes a value of a function's name and its arguments.
Reduce = Callable[[object, object], object]


def no_reference(_: object) -> object:
    """Refuses values that are kept outside the pickle.

    Raises:
        FormatError: Always.
    """
    raise FormatError("has a reference to what is kept elsewhere")


def walk(
    program: bytes,
    *,
    accepted: Set[str],
    reduce: Reduce,
    wanted: str,
    described: str,
    refer: Callable[[object], object] = no_reference,
) -> object:
    """What a pickle describes.

    Args:
        program: The pickle.
        accepted: Opcodes that it may have, such as `PLAIN_OPCODES`.
        reduce: Makes the values of calls.
        wanted: What it must hold, for the message when it has another opcode.
        described: What it describes, for the message when it is damaged.
        refer: Makes the values that are kept outside the pickle.

    Raises:
        FormatError: If it has other opcodes, or contradicts itself.
    """
    machine = _Machine(reduce, refer)
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name not in accepted:
                raise FormatError(f"must hold {wanted} and nothing else, its description has {opcode.name}")
            if opcode.name == "STOP":
                return machine.pop(1)[0]
            machine.step(opcode.name, argument)
    except FormatError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"has a damaged description of {described}: {shortened(str(error))}") from None
    raise FormatError(f"has a damaged description of {described}: it does not end")


class _Machine:
    """The stack and the memory that opcodes work on."""

    def __init__(self, reduce: Reduce, refer: Callable[[object], object]) -> None:
        self._reduce, self._refer = reduce, refer
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[object, object] = {}

    def pop(self, size: int) -> list[Any]:
        """The topmost values, taken off."""
        if not 0 <= size <= len(self._stack):
            raise IndexError("it takes more than it has")
        taken = self._stack[len(self._stack) - size :]
        del self._stack[len(self._stack) - size :]
        return taken

    def step(self, name: str, argument: object) -> None:
        """Carries out one opcode."""
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name == "MARK":
            self._marks.append(len(self._stack))
        elif name in _TUPLES:
            self._stack.append(tuple(self.pop(_TUPLES[name])))
        elif name in _TO_MARK:
            self._end_mark(name, self.pop(len(self._stack) - self._marks.pop()))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._make(name, argument)

    def _make(self, name: str, argument: object) -> None:
        """Opcodes that make a value of others, or change one."""
        if name == "GLOBAL":
            self._stack.append(Global(str(argument)))
        elif name == "STACK_GLOBAL":
            self._stack.append(Global(" ".join(map(str, self.pop(2)))))
        elif name == "BINPERSID":
            self._stack.append(self._refer(self.pop(1)[0]))
        elif name in ("REDUCE", "NEWOBJ"):
            self._stack.append(self._reduce(*self.pop(2)))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            self._stack.append([] if name == "EMPTY_LIST" else {})
        elif name == "BUILD":
            _set_state(self._stack[-2], self.pop(1)[0])
        elif name == "APPEND":
            _extend(self._stack[-2], self.pop(1))
        elif name == "SETITEM":
            _set_items(self._stack[-3], self.pop(2))

    def _end_mark(self, name: str, values: list[Any]) -> None:
        if name == "TUPLE":
            self._stack.append(tuple(values))
        elif name == "APPENDS":
            _extend(self._stack[-1], values)
        else:
            _set_items(self._stack[-1], values)


def _extend(target: object, values: list[object]) -> None:
    if not isinstance(target, list):
        raise TypeError("it appends to what is no list")
    target.extend(values)


def _set_items(target: object, values: list[object]) -> None:
    items = target.items if isinstance(target, Record) else target
    if not isinstance(items, dict):
        raise TypeError("it sets items of what has none")
    items.update(zip(values[::2], values[1::2], strict=True))


def _set_state(target: object, state: object) -> None:
    if not isinstance(target, Record):
        raise TypeError("it sets attributes of what is no object")
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None:
            target.attributes.update(part)
