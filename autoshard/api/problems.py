"""Why requests fail, as answers say it, and how the bodies of requests are checked."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.core.errors import FormatError


class Fault(BaseModel):
    """Why a part of a request could not be answered."""

    type: str = Field(description="The kind of error, as in a problem.")
    detail: str
    field: str | None = None


class RemedyAnswer(BaseModel):
    """A single change with which the planner found a plan."""

    field: str = Field(description="What to change, as a dotted path in the body.")
    value: int | str | None = Field(description="What to change it to; null for what is to be left out.")
    text: str = Field(description="The change in words.")
    step_ms: float = Field(description="Predicted milliseconds of a step of the plan that was found.")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="`urn:autoshard:problem:` and the kind of error, such as `infeasible`.")
    title: str = Field(description="The kind of error in words.")
    status: int
    detail: str = Field(description="What is wrong here, and what would be accepted.")
    field: str | None = Field(default=None, description="Dotted path of the offending field, if there is one.")
    table: str | None = Field(
        default=None,
        description="Of an infeasible task: the first table without room, where whole tables are placed by falling "
        "size; several share a rank.",
    )
    rank: int | None = Field(default=None, description="The rank that may hold it and has most room left.")
    missing_bytes: int | None = Field(default=None, description="Bytes of device memory that the rank lacks for it.")
    faults: list[Fault] | None = Field(default=None, description="All faults, of a table list that has several.")
    remedies: list[RemedyAnswer] | None = Field(
        default=None, description="Of an infeasible task: changes with which the service found a plan, one by one."
    )


#: How many keys there may be in fields whose keys are the client's.
MAX_FEATURES: Final = 1 << 14
_MAX_KEYS: Final = {"options": 128, "pooling_factors": MAX_FEATURES, "constraints": MAX_FEATURES}


class RequestBody(BaseModel):
    """Body of a request: no field but its own, no value of another kind."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    max_bytes: ClassVar[int] = 16 << 20
    """Longest JSON text of it. The 856 tables of MetaSyn take about 3 MB."""

    @classmethod
    def parse(cls, document: object) -> Self:
        """Checks a parsed body.

        Args:
            document: The parsed JSON.

        Raises:
            FormatError: If a field is missing, unknown or of the wrong kind; the text names the first one.
        """
        cls._check_keys(document)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise cls.fault_of(error) from None

    @classmethod
    def fault_of(cls, error: ValidationError) -> FormatError:
        """The first fault of a body, in this project's words."""
        first = error.errors(include_url=False, include_context=False)[0]
        return FormatError(cls._message(first["type"], first["msg"]), field=_path(first["loc"]) or None)

    @classmethod
    def _check_keys(cls, document: object) -> None:
        """Checks what validation would make an error of for each of what may be 100,000 keys, of a kilobyte each."""
        if not isinstance(document, dict):
            return
        for key, value in document.items():
            if key not in cls.model_fields:
                raise FormatError(cls._message("extra_forbidden", ""), field=_path((key,)))
            most = _MAX_KEYS.get(key)
            inner = list(value.values()) if most is not None and isinstance(value, dict) and len(value) <= most else []
            for one in (value, *inner):
                if most is not None and isinstance(one, dict) and len(one) > most:
                    raise FormatError(f"must have at most {most:,} keys, got {len(one):,}", field=key)

    @classmethod
    def _message(cls, kind: str, message: str) -> str:
        known = {
            "missing": "is missing",
            "extra_forbidden": f"is unknown; the body takes: {', '.join(cls.model_fields) or 'nothing'}",
        }
        return known.get(kind, message[:1].lower() + message[1:])


def examples(*bodies: dict[str, Any]) -> ConfigDict:
    """What a body's description shows."""
    return ConfigDict(json_schema_extra={"examples": list(bodies)})


def _path(location: tuple[int | str, ...]) -> str:
    if len(location) > 1 and location[0] != "options":
        location = location[:1]  # what follows is pydantic's name of a union's branch
    elif len(location) > 2:
        location = location[:2]
    return ".".join(str(part)[:100] for part in location)
