"""Bodies of requests about models, and of their answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from costmodel.registry.aliases import Alias

#: A part of a model's address, as the registry takes it.
KEY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"

Kind = Annotated[str, Field(pattern=KEY_PATTERN, description="What the model is for, such as cost or policy.")]
Name = Annotated[str, Field(pattern=KEY_PATTERN, description="Which one of its kind: the device.")]
VersionId = Annotated[str, Field(pattern="^[0-9a-f]{16}$", description="Id of a version.")]
_Alias = Annotated[Alias, Field(strict=False, description="What names the version from now on.")]


class PromotionBody(BaseModel):
    """A version that is to be used, or tried."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"version": "9b97839314088c75", "alias": "candidate"}]},
    )

    version: VersionId
    alias: _Alias = Alias.PRODUCTION
    force: bool = Field(
        default=False,
        description="Whether a cost model becomes the production one although it has not been compared in the shadow.",
    )


class RollbackBody(BaseModel):
    """An alias that is to be given back to the version that had it before."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"alias": "production"}]})

    alias: _Alias = Alias.PRODUCTION
