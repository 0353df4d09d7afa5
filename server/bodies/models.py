"""Bodies of requests about models, and of their answers."""

from __future__ import annotations

from typing import Annotated, Any

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


class ModelSummary(BaseModel):
    """A version as lists show it."""

    kind: str
    name: str
    id: str
    aliases: list[str]
    shipped: bool = Field(description="Whether it came with autoshard.")
    used: bool = Field(description="Whether requests are answered with it.")
    published_at: str
    relative_error: float | None = Field(description="Mean relative error on held-out samples; null if not on record.")
    card: dict[str, Any] | None = Field(default=None, description="Its card, if `cards` asked for it.")


class ModelList(BaseModel):
    """All versions, by kind, name and time; shipped ones last."""

    models: list[ModelSummary]


class ShadowSummary(BaseModel):
    """A candidate's prices of plans that the service made, beside those of the production model."""

    num_plans: int
    median_ratio: float | None = Field(description="Of the candidate's predicted step over the production model's.")
    least_ratio: float | None
    largest_ratio: float | None


class AliasChange(BaseModel):
    """A version that an alias named from then on."""

    id: str
    action: str
    at: str
    by: str


class ModelAnswer(ModelSummary):
    """A version with its card."""

    card: dict[str, Any]
    shadow: ShadowSummary
    history: dict[str, list[AliasChange]] = Field(
        description="What the aliases have named, the latest last; as shipped where the registry has given none."
    )


class ModelState(BaseModel):
    """What the aliases of a model name, and have named."""

    kind: str
    name: str
    production: str | None
    candidate: str | None
    history: dict[str, list[AliasChange]]

    @property
    def etag(self) -> str:
        """Changes with the aliases."""
        return f'"{self.production or "none"}-{self.candidate or "none"}-{sum(map(len, self.history.values()))}"'
