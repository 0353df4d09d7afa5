"""Batches of ids as the runtime takes them, and their embeddings.

Shape suffixes: F features, B samples of the local batch, L lookups, C columns of all pooled features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from autoshard.core import Pooling, TableSet
from autoshard.core.errors import InputError

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor

#: What TorchRec's modules return: pooled features, rows of sequence features, or both.
KeyedEmbeddings: TypeAlias = "KeyedTensor | dict[str, JaggedTensor] | tuple[KeyedTensor, dict[str, JaggedTensor]]"

_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOfIds:
    """Ids of all features of one local batch.

    Attributes:
        lengths_FB: Number of ids of each bag, int32 or int64.
        ids_L: The ids, feature by feature and bag by bag, int32 or int64.

    Raises:
        InputError: If shapes or dtypes are others.
    """

    lengths_FB: torch.Tensor
    ids_L: torch.Tensor

    def __post_init__(self) -> None:
        if self.lengths_FB.dim() != 2 or self.lengths_FB.dtype not in _ID_DTYPES:
            raise InputError(
                f"must be whole numbers of shape (features, batch), got {self.lengths_FB.dtype} of "
                f"{tuple(self.lengths_FB.shape)}",
                field="lengths",
            )
        if self.ids_L.dim() != 1 or self.ids_L.dtype not in _ID_DTYPES:
            raise InputError(
                f"must be one row of whole numbers, got {self.ids_L.dtype} of {tuple(self.ids_L.shape)}", field="ids"
            )

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths_FB.shape[1]

    def per_feature(self) -> tuple[torch.Tensor, ...]:
        """Ids of each feature."""
        return torch.split(self.ids_L, self.lengths_FB.sum(1).tolist())

    def to(self, device: torch.device) -> BatchOfIds:
        """The same batch on a device."""
        return BatchOfIds(self.lengths_FB.to(device), self.ids_L.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """Embeddings of a local batch.

    Attributes:
        pooled_BC: Pooled features side by side, in the plan's order.
        sequences: Rows of each sequence feature by name, in the order of its ids; (L, D) each.
    """

    pooled_BC: torch.Tensor
    sequences: Mapping[str, torch.Tensor]


class KeyedJagged(Protocol):
    """The part of TorchRec's `KeyedJaggedTensor` that is read; TorchRec itself need not be installed."""

    def keys(self) -> list[str]:
        """Names of the features."""
        ...

    def lengths(self) -> torch.Tensor:
        """Bag lengths, feature by feature."""
        ...

    def values(self) -> torch.Tensor:
        """Ids, feature by feature and bag by bag."""
        ...

    def weights_or_none(self) -> torch.Tensor | None:
        """Weights of the lookups."""
        ...

    def permute(self, indices: list[int]) -> KeyedJagged:
        """The features in another order."""
        ...


def as_batch(ids: BatchOfIds | KeyedJagged, features: Sequence[str]) -> BatchOfIds:
    """The batch in the order of `features`.

    Raises:
        InputError: If a keyed tensor lacks a feature, has weights, or a batch has another number of features.
    """
    if isinstance(ids, BatchOfIds):
        if len(ids.lengths_FB) != len(features):
            raise InputError(
                f"must have one row per feature, {len(features)}, got {len(ids.lengths_FB)}", field="lengths"
            )
        return ids
    keys = ids.keys()
    if ids.weights_or_none() is not None:
        raise InputError("weighted lookups are not executed: leave the weights out", field="weights")
    if list(keys) != list(features):
        place = {name: index for index, name in enumerate(keys)}
        missing = [name for name in features if name not in place]
        if missing:
            raise InputError(f"has no feature {missing[0]!r}, which the plan's tables look up", field="keys")
        ids = ids.permute([place[name] for name in features])
    return BatchOfIds(ids.lengths().view(len(features), -1), ids.values())


def as_keyed(
    embedded: Embedded, batch: BatchOfIds, tables: TableSet, names: Mapping[str, str] | None = None
) -> KeyedEmbeddings:
    """The embeddings as TorchRec's modules return them, features in the plan's order.

    Args:
        embedded: The embeddings.
        batch: The batch that was looked up.
        tables: The plan's tables.
        names: Names that features have in the result; None for their own.

    Returns:
        A `KeyedTensor` of pooled features, as from an `EmbeddingBagCollection`; a `JaggedTensor` of rows for each
        sequence feature, as from an `EmbeddingCollection`; or the pair of both, if there are features of both kinds.
    """
    # A trainer without TorchRec has no keyed batches.
    from torchrec import JaggedTensor, KeyedTensor

    own = [(feature.name, table) for table in tables.tables for feature in table.features]
    features = [(name if names is None else names[name], table) for name, table in own]
    pooled = {name: table.embedding_dim for name, table in features if table.pooling is not Pooling.SEQUENCE}
    keyed = KeyedTensor(keys=list(pooled), length_per_key=list(pooled.values()), values=embedded.pooled_BC)
    sequences = {
        name: JaggedTensor(values=embedded.sequences[feature], lengths=lengths_B)
        for (name, _), (feature, _), lengths_B in zip(features, own, batch.lengths_FB, strict=True)
        if feature in embedded.sequences
    }
    if not sequences:
        return keyed
    return (keyed, sequences) if pooled else sequences
