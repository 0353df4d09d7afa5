"""What is told about samples that were sent to the service."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

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


class QuarantinedFile(BaseModel):
    """A file that was refused, and is kept to be looked at."""

    id: FileId
    detail: str = Field(description="What is wrong with it.")


class SampleList(BaseModel):
    """What the service has been sent or has collected."""

    samples: list[StoredSamples]
    quarantined: list[QuarantinedFile] = Field(description="The latest 64.")
