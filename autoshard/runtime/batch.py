"""Batches of ids as the runtime takes them, and their embeddings.

Shape suffixes: F features, B samples of the local batch, L lookups, C columns of all pooled features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import fbgemm_gpu  # noqa: F401 - registers the operators of torch.ops.fbgemm
import torch
from torch.nn.utils.rnn import pad_sequence

from autoshard.core import Pooling, TableSet
from autoshard.core.errors import InputError
from autoshard.core.quoting import shortened, shown

if TYPE_CHECKING:
    from torchrec import JaggedTensor, KeyedTensor

#: Pooled features; by name where each has samples of its own.
KeyedPooled: TypeAlias = "KeyedTensor | dict[str, torch.Tensor]"
#: What TorchRec's modules return: pooled features, rows of sequence features, or both.
KeyedEmbeddings: TypeAlias = "KeyedPooled | dict[str, JaggedTensor] | tuple[KeyedPooled, dict[str, JaggedTensor]]"

_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOfIds:
    """Ids of all features of one local batch.

    What is wrong with a batch is an error where it is looked up, on all processes: none may leave the others waiting.

    Attributes:
        lengths_FB: Number of ids of each bag, int32 or int64.
        ids_L: The ids, feature by feature and bag by bag, int32 or int64.
        order: Which rows of the lengths are those of the plan's features, each once; None where they are in its order.
        sizes_F: Samples of each of the plan's features, at most B, where they have several numbers of them: behind
            these, a feature has bags without ids.
        inverse_FB: For each of the plan's features and sample of the result, the sample of the feature that it gets,
            int32 or int64; None where each gets its own.
        weights_L: By which each id's row is multiplied before a bag is summed up, float32; None where lookups are not
            weighted. Sequences are of rows as they are, whatever the weights of their ids.
        names: Names of the plan's features in embeddings as TorchRec's modules return them, see `as_keyed`; None for
            embeddings as `Embedded`.
    """

    lengths_FB: torch.Tensor
    ids_L: torch.Tensor
    order: tuple[int, ...] | None = None
    sizes_F: tuple[int, ...] | None = None
    inverse_FB: torch.Tensor | None = None
    weights_L: torch.Tensor | None = None
    names: tuple[str, ...] | None = None

    def fault(self, num_features: int, device: torch.device, *, is_weighted: bool) -> InputError | None:
        """What is wrong with shapes, dtypes or devices, if anything is; no value is read.

        Args:
            num_features: F.
            device: Where the batch has to be.
            is_weighted: Whether ids must have weights, if there are any; else they must have none.
        """
        for field, tensor, num_dims, dtypes in (
            ("lengths", self.lengths_FB, 2, _ID_DTYPES),
            ("ids", self.ids_L, 1, _ID_DTYPES),
            ("weights", self.weights_L, 1, (torch.float32,)),
            ("inverse_indices", self.inverse_FB, 2, _ID_DTYPES),
        ):
            if field in ("weights", "inverse_indices") and tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                return InputError(f"must be a tensor, got {type(tensor).__name__}", field=field)
            if tensor.layout is not torch.strided:
                return InputError(f"must be a dense tensor, got {tensor.layout}", field=field)
            if tensor.dim() != num_dims or tensor.dtype not in dtypes:
                numbers = "whole numbers" if dtypes is _ID_DTYPES else "float32 numbers"
                wanted = f"{numbers} of shape (features, batch)" if num_dims == 2 else f"one row of {numbers}"
                return InputError(f"must be {wanted}, got {tensor.dtype} of {tuple(tensor.shape)}", field=field)
            if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
                return InputError(f"must be on {device}, got {tensor.device}", field=field)
        for field, rows in (("lengths", self.lengths_FB), ("inverse_indices", self.inverse_FB)):
            if rows is not None and len(rows) != num_features:
                return InputError(f"must have one row per feature, {num_features}, got {len(rows)}", field=field)
        fault = self._order_fault() or self._weights_fault(is_weighted=is_weighted)
        if fault is not None or self.batch_size:
            return fault
        return self.lengths_fault((), has_negative=False)

    def _order_fault(self) -> InputError | None:
        """What is wrong with the order of the features, or with their numbers of samples."""
        num_features, sizes = len(self.lengths_FB), self.sizes_F
        if self.order is not None and (not _are_whole(self.order) or sorted(self.order) != list(range(num_features))):
            return InputError(f"must have each of the {num_features} rows of the lengths once", field="order")
        if sizes is not None and (
            not _are_whole(sizes) or len(sizes) != num_features or not 0 <= min(sizes) <= max(sizes) <= self.batch_size
        ):
            return InputError(
                f"must be {num_features} numbers of samples, at most {self.batch_size} each", field="sizes"
            )
        return None

    def _weights_fault(self, *, is_weighted: bool) -> InputError | None:
        """What is wrong with weights that are a row of numbers, or with there being some or none."""
        if self.weights_L is None:
            is_missing = is_weighted and len(self.ids_L) > 0
            return InputError("must be there: lookups are weighted", field="weights") if is_missing else None
        if not is_weighted:
            return InputError(
                "lookups are not weighted: leave them out, or plan tables that are weighted", field="weights"
            )
        if len(self.weights_L) != len(self.ids_L):
            return InputError(f"must be one for each id, {len(self.ids_L)}, got {len(self.weights_L)}", field="weights")
        if self.weights_L.requires_grad:
            return InputError("get no gradients: detach them", field="weights")
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

    def id_fault(self, tables: TableSet) -> InputError | None:
        """What is wrong with the first id that is no row of its table, if there is one; the lengths must be right.

        Args:
            tables: Tables of the features.
        """
        looked_up = [(table, feature.name) for table in tables.tables for feature in table.features]
        order = range(len(looked_up)) if self.order is None else self.order
        ids_F = self.per_feature(self.ids_L)
        for row, (table, name) in zip(order, looked_up, strict=True):
            is_bad_L = (ids_F[row] < 0) | (ids_F[row] >= table.num_embeddings)
            for bad in ids_F[row][is_bad_L][:1].tolist():
                return InputError(
                    f"table {table.name!r} has rows 0 to {table.num_embeddings - 1}, got id {bad}",
                    field=f"feature {name!r}",
                )
        return None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.lengths_FB.shape[1]

    def lengths_of(self, feature: int) -> torch.Tensor:
        """Bag lengths of one of the plan's features, for the samples that it has."""
        lengths_B = self.lengths_FB[feature if self.order is None else self.order[feature]]
        return lengths_B if self.sizes_F is None else lengths_B[: self.sizes_F[feature]]

    def per_feature(self, of_L: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Ids of each feature, or their weights."""
        return torch.split(of_L, self.lengths_FB.sum(1).tolist())

    def changed(self, lengths_FB: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchOfIds:
        """A batch of other lengths, with what `change` makes of its ids and of their weights."""
        weights_L = None if self.weights_L is None else change(self.weights_L)
        return replace(self, lengths_FB=lengths_FB, ids_L=change(self.ids_L), weights_L=weights_L)

    @classmethod
    def joined(cls, parts: Sequence[BatchOfIds]) -> BatchOfIds:
        """The samples of several batches as those of one; ids of all of them have weights, or of none."""

        def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
            per_feature = [part.per_feature(of_L) for part, of_L in zip(parts, rows, strict=True)]
            return torch.cat([piece for feature in zip(*per_feature, strict=True) for piece in feature])

        lengths_FB = torch.cat([part.lengths_FB for part in parts], dim=1)
        weights = [torch.empty(0, dtype=torch.float32) if part.weights_L is None else part.weights_L for part in parts]
        is_weighted = any(part.weights_L is not None for part in parts)
        return cls(
            lengths_FB,
            joined([part.ids_L for part in parts]),
            weights_L=joined(weights) if is_weighted else None,
        )

    def to(self, device: torch.device, *, non_blocking: bool = False) -> BatchOfIds:
        """The same batch on a device.

        Args:
            device: The device.
            non_blocking: Whether the host goes on while a GPU copies from pinned memory.
        """
        return replace(
            self,
            lengths_FB=self.lengths_FB.to(device, non_blocking=non_blocking),
            ids_L=self.ids_L.to(device, non_blocking=non_blocking),
            inverse_FB=None if self.inverse_FB is None else self.inverse_FB.to(device, non_blocking=non_blocking),
            weights_L=None if self.weights_L is None else self.weights_L.to(device, non_blocking=non_blocking),
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


def _are_whole(numbers: object) -> bool:
    """Whether they are a row of whole numbers, whatever a caller gave."""
    return isinstance(numbers, (tuple, list)) and all(isinstance(one, Integral) for one in numbers)


def as_batch(
    ids: object,
    features: Sequence[str],
    shared: Mapping[str, str] | None = None,
    *,
    names: Sequence[str] | None = None,
    leaves_weights: bool = False,
) -> BatchOfIds | InputError:
    """The batch in the order of `features`, or what is wrong with it.

    Args:
        ids: A `BatchOfIds` or a `KeyedJaggedTensor`.
        features: Names of its features that are looked up.
        shared: As `TableSet.shared_features` has them; None for none.
        names: Names of the same features in the embeddings of a `KeyedJaggedTensor`; None for their own.
        leaves_weights: Whether weights of lookups are left aside.
    """
    if isinstance(ids, (BatchOfIds, InputError)):
        return ids
    if not isinstance(ids, KeyedJagged):
        return InputError(f"must be a BatchOfIds or a KeyedJaggedTensor, got {type(ids).__name__}", field="batch")
    try:
        batch = _of_keyed(ids, features, shared or {}, leaves_weights=leaves_weights)
        return replace(batch, names=tuple(features if names is None else names))
    except InputError as error:
        return error
    except Exception as error:  # noqa: BLE001 - raised again by all processes, which wait for this one else
        return unreadable(error)


def unreadable(error: Exception) -> InputError:
    """What is wrong with a batch that could not be read or made."""
    fault = InputError(f"cannot be read: {type(error).__name__}: {shortened(str(error))}", field="batch")
    fault.__cause__ = error
    return fault


def _of_keyed(
    ids: KeyedJagged, features: Sequence[str], shared: Mapping[str, str], *, leaves_weights: bool
) -> BatchOfIds:
    """The features of a keyed tensor.

    Raises:
        InputError: If it lacks one, has one twice, or there are too many or few lengths.
    """
    keys = list(ids.keys())
    place = {name: index for index, name in enumerate(keys)}
    wanted = [name if name in place else shared.get(name, name) for name in features]
    missing = [name for name, key in zip(features, wanted, strict=True) if key not in place]
    if missing:
        raise InputError(f"has no feature {shown(missing[0])}, which the plan's tables look up", field="keys")
    if len(place) < len(keys):
        twice = next(name for name in keys if keys.count(name) > 1)
        raise InputError(f"has feature {shown(twice)} more than once", field="keys")
    sizes, lengths, order = ids.stride_per_key(), ids.lengths(), tuple(place[key] for key in wanted)
    is_even = len(set(sizes)) == 1
    if lengths.numel() != sum(sizes):
        as_many = "as many for each feature" if is_even else f"{sum(sizes)}, one for each sample of each feature"
        raise InputError(f"must be {as_many}, got {lengths.numel()} for {len(keys)} features", field="lengths")
    batch = BatchOfIds(
        lengths.view(len(keys), sizes[0])
        if is_even
        else pad_sequence(list(torch.split(lengths, list(sizes))), batch_first=True),
        ids.values(),
        weights_L=None if leaves_weights else ids.weights_or_none(),
    )
    sizes_F = tuple(sizes[row] for row in order)
    if sorted(order) != list(range(len(keys))):
        batch = _chosen(batch, order, max(sizes_F))
    elif keys != wanted:
        batch = replace(batch, order=order)
    return replace(
        batch,
        sizes_F=sizes_F if len(set(sizes_F)) > 1 else None,
        inverse_FB=_inverse(ids.inverse_indices_or_none(), wanted),
    )


def _inverse(inverse: tuple[list[str], torch.Tensor] | None, features: Sequence[str]) -> torch.Tensor | None:
    """Inverse indices of some features.

    Raises:
        InputError: If a feature has none.
    """
    if inverse is None:
        return None
    names, inverse_KB = inverse
    missing = [name for name in features if name not in names]
    if missing:
        raise InputError(f"must be there for feature {shown(missing[0])}, too", field="inverse_indices")
    if names == list(features):
        return inverse_KB
    return torch.stack([inverse_KB[names.index(name)] for name in features])


def _chosen(batch: BatchOfIds, order: Sequence[int], num_samples: int) -> BatchOfIds:
    """Some of a batch's features, or some of them twice; on a GPU, the host waits for how many ids they have.

    Args:
        batch: The batch.
        order: Rows of the features.
        num_samples: The most samples that one of these features has.

    Raises:
        InputError: If the batch is a bad one.
    """
    fault = batch.fault(len(batch.lengths_FB), batch.ids_L.device, is_weighted=batch.weights_L is not None)
    if fault is not None:
        raise fault
    has_negative, *counts = torch.cat([(batch.lengths_FB < 0).any().view(1), batch.lengths_FB.sum(1)]).tolist()
    fault = batch.lengths_fault(counts, has_negative=bool(has_negative))
    if fault is not None:
        raise fault

    def chosen(of_L: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(of_L, counts)
        return torch.cat([pieces[row] for row in order])

    return batch.changed(torch.stack([batch.lengths_FB[row, :num_samples] for row in order]), chosen)


def of_result(embedded: Embedded, batch: BatchOfIds, tables: TableSet) -> Embedded:
    """Embeddings of the samples of the result: those that inverse indices name, where a batch has some.

    On a GPU, the host then waits for how many rows sequences have.

    Args:
        embedded: The embeddings of the batch's own samples.
        batch: The batch that was looked up.
        tables: The plan's tables.
    """
    if batch.inverse_FB is None:
        return embedded
    features = [(table, feature.name) for table in tables.tables for feature in table.features]
    dims = [table.embedding_dim for table, _ in features if table.pooling is not Pooling.SEQUENCE]
    pieces, sequences = iter(torch.split(embedded.pooled_BC, dims, dim=1)), dict[str, torch.Tensor]()
    pooled = [embedded.pooled_BC.new_empty(batch.inverse_FB.shape[1], 0)]
    for feature, ((table, name), inverse_B) in enumerate(zip(features, batch.inverse_FB, strict=True)):
        if table.pooling is Pooling.SEQUENCE:
            sequences[name] = _repeated(batch.lengths_of(feature), embedded.sequences[name], inverse_B)
        else:
            pooled.append(next(pieces).index_select(0, inverse_B))
    return Embedded(torch.cat(pooled, dim=1), sequences)


def as_keyed(embedded: Embedded, batch: BatchOfIds, tables: TableSet) -> KeyedEmbeddings:
    """The embeddings as TorchRec's modules return them, features in the plan's order.

    Args:
        embedded: The embeddings of the samples of the result, see `of_result`.
        batch: The batch that was looked up, with names for the result.
        tables: The plan's tables.

    Returns:
        A `KeyedTensor` of pooled features, as from an `EmbeddingBagCollection`; a `JaggedTensor` of rows for each
        sequence feature, as from an `EmbeddingCollection`; or the pair of both, if there are features of both kinds.
        With inverse indices, each sample has that of its features which they name, as in TorchRec; without, where
        features have several numbers of samples, pooled ones are by name, each (its samples, D).
    """
    # A trainer without TorchRec has no keyed batches.
    from torchrec import JaggedTensor, KeyedTensor

    assert batch.names is not None, "it is of a keyed tensor"
    own = [feature.name for table in tables.tables for feature in table.features]
    dims = [table.embedding_dim for table in tables.tables for _ in table.features]
    is_pooled = [table.pooling is not Pooling.SEQUENCE for table in tables.tables for _ in table.features]
    sequences = {}
    for feature, (name, key) in enumerate(zip(own, batch.names, strict=True)):
        if name in embedded.sequences:
            lengths_B = batch.lengths_of(feature)
            if batch.inverse_FB is not None:
                lengths_B = lengths_B.index_select(0, batch.inverse_FB[feature])
            sequences[key] = JaggedTensor(values=embedded.sequences[name], lengths=lengths_B)
    pooled = {key: dim for key, dim, of in zip(batch.names, dims, is_pooled, strict=True) if of}
    keyed: KeyedPooled
    if batch.sizes_F is None or batch.inverse_FB is not None:
        keyed = KeyedTensor(keys=list(pooled), length_per_key=list(pooled.values()), values=embedded.pooled_BC)
    else:
        sizes = [size for size, of in zip(batch.sizes_F, is_pooled, strict=True) if of]
        pieces = torch.split(embedded.pooled_BC, list(pooled.values()), dim=1)
        keyed = {key: piece[:size] for key, piece, size in zip(pooled, pieces, sizes, strict=True)}
    if not sequences:
        return keyed
    return (keyed, sequences) if pooled else sequences


def _repeated(lengths_B: torch.Tensor, rows_LD: torch.Tensor, inverse_B: torch.Tensor) -> torch.Tensor:
    """Rows of the sequences of the samples that inverse indices name."""
    lookups_L = torch.arange(len(rows_LD), device=rows_LD.device)
    _, lookups, _ = torch.ops.fbgemm.permute_1D_sparse_data(inverse_B.int(), lengths_B, lookups_L)
    return rows_LD.index_select(0, lookups)
