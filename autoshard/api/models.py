"""Trained models, and the samples that they are trained from."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, Field

from autoshard.api.problems import RequestBody, examples
from autoshard.core.choices import Alias

#: A part of a model's address, as the registry takes it.
_KEY_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"

ModelKind = Annotated[str, Field(pattern=_KEY_PATTERN, description="What the model is for, such as cost or policy.")]
ModelName = Annotated[str, Field(pattern=_KEY_PATTERN, description="Which one of its kind: the device.")]
VersionId = Annotated[str, Field(pattern="^[0-9a-f]{16}$", description="Id of a version.")]
_Alias = Annotated[Alias, Field(strict=False, description="What names the version from now on.")]


class PromotionBody(RequestBody):
    """A version that is to be used, or tried."""

    max_bytes: ClassVar[int] = 1 << 10
    model_config = examples({"version": "9b97839314088c75", "alias": "candidate"})

    version: VersionId
    alias: _Alias = Alias.PRODUCTION
    force: bool = Field(
        default=False,
        description="Whether a version becomes the production one although it was worse when it was trained, or is a "
        "cost model that has not been compared in the shadow.",
    )


class RollbackBody(RequestBody):
    """An alias that is to be given back to the version that had it before."""

    max_bytes: ClassVar[int] = 1 << 10
    model_config = examples({"alias": "production"})

    alias: _Alias = Alias.PRODUCTION


class ModelSummary(BaseModel):
    """A version as lists show it."""

    used: bool = Field(title="in use", description="Whether requests are answered with it.")
    kind: str
    name: str = Field(title="device")
    id: str = Field(title="version")
    aliases: list[str]
    relative_error: float | None = Field(
        title="held-out error", description="Mean relative error on held-out samples; null if not on record."
    )
    shipped: bool = Field(description="Whether it came with autoshard.")
    published_at: str = Field(title="published, UTC")
    card: dict[str, Any] | None = Field(default=None, description="Its card, if `cards` asked for it.")


class ModelList(BaseModel):
    """All versions, by kind, name and time; shipped ones last."""

    models: list[ModelSummary]


class ShadowSummary(BaseModel):
    """A candidate's prices of plans that the service made, beside those of the version that is in use now."""

    num_plans: int = Field(description="Different plans that both have priced.")
    median_ratio: float | None = Field(description="Of the candidate's predicted step over the production model's.")
    least_ratio: float | None
    largest_ratio: float | None


class AliasChange(BaseModel):
    """A version that an alias named from then on."""

    id: str
    action: str
    at: str
    by: str
    request: str = Field(default="", exclude=True, description="Name of the request that made it, if it has one.")


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


#: Media type of the files.
PARQUET = "application/vnd.apache.parquet"


FileId = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the file.")]


class SamplesAnswer(BaseModel):
    """A file that was added to the service's samples."""

    id: FileId
    kind: str = Field(description="What was measured: kernels, dense or collectives.")
    device: str = Field(description="Key of the device.")
    num_samples: int


class StoredSamples(BaseModel):
    """Samples of one kind and device; copies count as often as they were sent."""

    kind: str
    device: str
    num_samples: int
    owners: list[str] = Field(description="Who sent them; none where the service's jobs measured them all.")


class QuarantinedFile(BaseModel):
    """A file that was refused, and is kept to be looked at."""

    id: FileId
    detail: str = Field(description="What is wrong with it.")
    owner: str = Field(description="Who sent it.")


class SampleList(BaseModel):
    """What the service has been sent or has collected."""

    samples: list[StoredSamples]
    quarantined: list[QuarantinedFile] = Field(description="The latest 64.")
