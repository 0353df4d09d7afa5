"""Options of commands as dataclasses: each is stated once, for the command line and for callers in Python.

A field with `Annotated[..., typer.Option(...)]` is an option of the command line: its name, default, help, range and
panel come from there; of a field that declares a `Meaning`, that is the help. Other fields are set in Python only, and
a field that is such a dataclass itself adds its options at its place. `autoshard.cli` turns a function that takes such
a dataclass into a command (`as_typer_function`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.models import ParameterInfo

from autoshard.core.accepted import Range
from autoshard.core.declared import Meaning
from autoshard.core.errors import InvalidOptionError

T = TypeVar("T")

_PANEL = "_option_panel"


@dataclass(frozen=True, slots=True)
class Needs:
    """Says, in a field's `Annotated`, that the option does nothing without another one.

    On the command line, the option is then refused.

    Attributes:
        option: The other option, as the user gives it.
        is_given: Whether it is there, by the dataclass that has the field.
    """

    option: str
    is_given: Callable[[Any], bool]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def command_options(*, panel: str | None = None) -> Callable[[type[T]], type[T]]:
    """Makes a frozen keyword-only dataclass of a class whose fields are options of a command.

    Instances refuse values out of an option's range (InvalidOptionError) before `__post_init__` of the class is called.

    Args:
        panel: Heading of the options in the help, where they name none themselves.
    """

    def decorate(cls: type[T]) -> type[T]:
        own_checks = getattr(cls, "__post_init__", None)

        def check(self: Any) -> None:
            made_of: Any = type(self)
            for name, option in _options_of(made_of).items():
                if isinstance(option, _Option):
                    option.check_range(getattr(self, name))
            if own_checks is not None:
                own_checks(self)

        setattr(cls, "__post_init__", check)  # noqa: B010 (mypy knows no such attribute)
        setattr(cls, _PANEL, panel)
        return dataclass(frozen=True, slots=True, kw_only=True)(cls)

    return decorate


def as_typer_function(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: with one parameter for every option of its dataclasses.

    Args:
        function: Its parameters that are made by `command_options` are replaced; all others stay.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if _is_options(hint)}
    if not groups:
        return function
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += [option.parameter for option in _flat(groups[name])]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    def run(context: typer.Context, **values: Any) -> None:
        given = {name: _made(group, values, context) for name, group in groups.items()}
        function(**given, **{name: value for name, value in values.items() if name in hints})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


@dataclass(frozen=True, slots=True)
class _Option:
    """A field that is an option of the command line."""

    name: str
    annotation: Any
    info: ParameterInfo
    default: object
    needs: Needs | None

    def check_range(self, value: Any) -> None:
        if self.info.min is not None or self.info.max is not None:
            for one in value if isinstance(value, list) else [value]:
                Range(at_least=self.info.min, at_most=self.info.max).check(one, self.name)
        if self.info.callback is not None:
            try:
                self.info.callback(value)
            except typer.BadParameter as error:
                raise InvalidOptionError(error.message, field=self.name) from error

    def check_needs(self, context: typer.Context, options: Any) -> None:
        source = context.get_parameter_source(self.name)
        is_typed = source is not None and source.name == "COMMANDLINE"
        if is_typed and self.needs is not None and not self.needs.is_given(options):
            flag = next(max(known.opts, key=len) for known in context.command.params if known.name == self.name)
            raise InvalidOptionError(f"needs {self.needs.option}", field=flag)

    @property
    def parameter(self) -> inspect.Parameter:
        """Parameter of the function that typer reads."""
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.annotation)


def _is_options(hint: Any) -> bool:
    return is_dataclass(hint) and hasattr(hint, _PANEL)


@cache
def _options_of(cls: type) -> Mapping[str, _Option | type]:
    """Options by the name of their field, and the dataclasses of fields that are options themselves."""
    found: dict[str, _Option | type] = {}
    # Modules' names as globals: functions in annotations look names up there when they are called.
    hints = get_type_hints(cls, localns={}, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        infos = [mark for mark in marks if isinstance(mark, ParameterInfo)]
        infos += [_declared_option(mark, marks) for mark in marks if isinstance(mark, Meaning)]
        if _is_options(hint):
            found[field.name] = hint
        elif infos:
            info = copy(infos[0])  # several commands may share it
            info.rich_help_panel = info.rich_help_panel or getattr(cls, _PANEL)
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            needs = next((mark for mark in marks if isinstance(mark, Needs)), None)
            found[field.name] = _Option(field.name, Annotated[hint.__origin__, info], info, default, needs)
    return found


def _declared_option(meaning: Meaning, marks: Sequence[object]) -> ParameterInfo:
    """The option of a field that declares its meaning, and a number's range."""
    accepted = next((mark for mark in marks if isinstance(mark, Range)), None)
    if accepted is None:
        return typer.Option(help=meaning.text)  # type: ignore[no-any-return]

    def checked(value: float | None) -> float | None:
        if value is not None and value not in accepted:
            raise typer.BadParameter(f"must be {accepted}, got {value:g}")
        return value

    metavar = f"<float {replace(accepted, kind='')}>"
    return typer.Option(help=meaning.text, callback=checked, metavar=metavar)  # type: ignore[no-any-return]


def _flat(cls: type) -> Iterator[_Option]:
    for option in _options_of(cls).values():
        if isinstance(option, _Option):
            yield option
        else:
            yield from _flat(option)


def _made(cls: Any, values: Mapping[str, Any], context: typer.Context) -> Any:
    """The options, from the values of the command line."""
    given, own = {}, []
    for name, option in _options_of(cls).items():
        if isinstance(option, _Option):
            given[name] = values[name]
            own.append(option)
        else:
            given[name] = _made(option, values, context)
    made = cls(**given)
    for option in own:
        option.check_needs(context, made)
    return made
