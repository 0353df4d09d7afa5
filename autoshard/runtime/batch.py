"""Batches of ids as the runtime takes them, and their embeddings.

Shape suffixes: F features, B samples of the local batch, L lookups, C columns of all pooled features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from autoshard.core import Pooling, TableSet
from autoshard.core.errors import InputError
from autoshard.core.quoting import shortened, shown

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor

#: What TorchRec's modules return: pooled features, rows of sequence features, or both.
KeyedEmbeddings: TypeAlias = "KeyedTensor | dict[str, JaggedTensor] | tuple[KeyedTensor, dict[str, JaggedTensor]]"

_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOfIds:
    """Ids of all features of one local batch.

    What is wrong with a batch is an error where it is looked up, on all processes: none may leave the others waiting.

    Attributes:
        lengths_FB: Number of ids of each bag, int32 or int64.
        ids_L: The ids, feature by feature and bag by bag, int32 or int64.
    """

    lengths_FB: torch.Tensor
    ids_L: torch.Tensor

    def fault(self, num_features: int, device: torch.device) -> InputError | None:
        """What is wrong with shapes, dtypes or devices, if anything is; no value is read.

        Args:
            num_features: F.
            device: Where the batch has to be.
        """
        for field, tensor, num_dims in (("lengths", self.lengths_FB, 2), ("ids", self.ids_L, 1)):
            if not isinstance(tensor, torch.Tensor):
                return InputError(f"must be a tensor, got {type(tensor).__name__}", field=field)
            if tensor.layout is not torch.strided:
                return InputError(f"must be a dense tensor, got {tensor.layout}", field=field)
            if tensor.dim() != num_dims or tensor.dtype not in _ID_DTYPES:
                wanted = "whole numbers of shape (features, batch)" if num_dims == 2 else "one row of whole numbers"
                return InputError(f"must be {wanted}, got {tensor.dtype} of {tuple(tensor.shape)}", field=field)
            if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
                return InputError(f"must be on {device}, got {tensor.device}", field=field)
        if len(self.lengths_FB) != num_features:
            return InputError(
                f"must have one row per feature, {num_features}, got {len(self.lengths_FB)}", field="lengths"
            )
        return None

    def lengths_fault(self, counts_F: Sequence[int], *, has_negative: bool) -> InputError | None:
        """What is wrong with the lengths, if anything is.

        Args:
            counts_F: Their sums.
            has_negative: Whether one is below 0.
        """
        if has_negative:
            return InputError("must be at least 0", field="lengths")
        if sum(counts_F) != len(self.ids_L):
            return InputError(f"add up to {sum(counts_F)}, but there are {len(self.ids_L)} ids", field="lengths")
        return None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths_FB.shape[1]

    def per_feature(self) -> tuple[torch.Tensor, ...]:
        """Ids of each feature."""
        return torch.split(self.ids_L, self.lengths_FB.sum(1).tolist())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> BatchOfIds:
        """The same batch on a device.

        Args:
            device: The device.
            non_blocking: Whether the host goes on while a GPU copies from pinned memory.
        """
        return BatchOfIds(
            self.lengths_FB.to(device, non_blocking=non_blocking), self.ids_L.to(device, non_blocking=non_blocking)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """Embeddings of a local batch.

    Attributes:
        pooled_BC: Pooled features side by side, in the plan's order.
        sequences: Rows of each sequence feature by name, in the order of its ids; (L, D) each.
    """

    pooled_BC: torch.Tensor
    sequences: Mapping[str, torch.Tensor]


@runtime_checkable
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

    def stride_per_key(self) -> list[int]:
        """Samples of each feature."""
        ...

    def inverse_indices_or_none(self) -> tuple[list[str], torch.Tensor] | None:
        """For each feature, the sample whose embedding each sample of the batch gets."""
        ...


def as_batch(ids: object, features: Sequence[str], *, leaves_weights: bool = False) -> BatchOfIds | InputError:
    """The batch in the order of `features`, or what is wrong with it.

    Args:
        ids: A `BatchOfIds` or a `KeyedJaggedTensor`.
        features: Names of its features that are looked up.
        leaves_weights: Whether weights of lookups are left aside, not refused.
    """
    if isinstance(ids, (BatchOfIds, InputError)):
        return ids
    if not isinstance(ids, KeyedJagged):
        return InputError(f"must be a BatchOfIds or a KeyedJaggedTensor, got {type(ids).__name__}", field="batch")
    try:
        return _of_keyed(ids, features, leaves_weights=leaves_weights)
    except InputError as error:
        return error
    except Exception as error:  # noqa: BLE001 - raised again by all processes, which wait for this one else
        fault = InputError(f"cannot be read: {type(error).__name__}: {shortened(str(error))}", field="batch")
        fault.__cause__ = error
        return fault


def _of_keyed(ids: KeyedJagged, features: Sequence[str], *, leaves_weights: bool) -> BatchOfIds:
    """The features of a keyed tensor.

    Raises:
        InputError: If it lacks one, has one twice, its lookups have weights, or features have batches of several sizes.
    """
    keys = list(ids.keys())
    place = {name: index for index, name in enumerate(keys)}
    missing = [name for name in features if name not in place]
    if missing:
        raise InputError(f"has no feature {shown(missing[0])}, which the plan's tables look up", field="keys")
    if len(place) < len(keys):
        twice = next(name for name in keys if keys.count(name) > 1)
        raise InputError(f"has feature {shown(twice)} more than once", field="keys")
    if not leaves_weights and ids.weights_or_none() is not None:
        raise InputError("weighted lookups are not executed: leave the weights out", field="weights")
    sizes, lengths = ids.stride_per_key(), ids.lengths()
    batch_size = sizes[0]
    other = next((index for index, size in enumerate(sizes) if size != batch_size), None)
    if other is not None or ids.inverse_indices_or_none() is not None:
        found = "inverse indices"
        if other is not None:
            found = f"{batch_size} of {shown(keys[0])} and {sizes[other]} of {shown(keys[other])}"
        raise InputError(
            "batches of several sizes (VBE) are not executed: give all features the same number of samples, without "
            f"inverse indices; got {found}",
            field="keys",
        )
    if lengths.numel() != len(keys) * batch_size:
        raise InputError(
            f"must be as many for each feature, got {lengths.numel()} for {len(keys)} features", field="lengths"
        )
    batch = BatchOfIds(lengths.view(len(keys), batch_size), ids.values())
    if keys == list(features):
        return batch
    fault = batch.fault(len(keys), batch.ids_L.device)
    if fault is not None:
        raise fault
    # One read of the host, of all that it has to know.
    has_negative, *counts = torch.cat([(lengths < 0).any().view(1), batch.lengths_FB.sum(1)]).tolist()
    fault = batch.lengths_fault(counts, has_negative=bool(has_negative))
    if fault is not None:
        raise fault
    places, ids_of = [place[name] for name in features], torch.split(batch.ids_L, counts)
    return BatchOfIds(
        torch.stack([batch.lengths_FB[index] for index in places]), torch.cat([ids_of[index] for index in places])
    )


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
