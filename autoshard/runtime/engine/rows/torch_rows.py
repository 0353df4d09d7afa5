"""Rows that torch looks up and updates, by the rules of FBGEMM's optimizers.

These are rows that several processes hold, and rows of optimizers that FBGEMM has no kernel for on the device.

Shape suffixes: N rows, D embedding dim, F features, G samples of the global batch, O columns of the kernel's output,
L lookups, U distinct rows, X bags or lookups that have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from autoshard.core import DType, Optimizer
from autoshard.core.optimizers import WeightDecayMode
from autoshard.runtime.engine.rows.averaging import UPDATED, RowStates
from autoshard.runtime.engine.rows.fused import FusedSettings, UpdateStep, rounds_at_random
from autoshard.runtime.engine.rows.huge_pages import huge_zeros
from autoshard.runtime.engine.staging import TORCH_DTYPES

#: Values of rows that are updated at once where all rows of a table are: 16 MiB.
_VALUES_AT_ONCE = 1 << 22


class TorchRows:
    """Rows of one width, and the optimizer's moments.

    Copies that start alike and get the same updates stay alike.

    Args:
        num_rows: N.
        dim: D.
        dtype: Of the weights.
        optimizer: Any that trains.
        settings: Of its updates.
        device: Where to hold them.

    Attributes:
        weights_ND: The weights.
        moments: By name, as `RowStates` has them.
        marks_N: Bits of rows that were updated (`RowStates`); None where they are not marked.
        moves_without_gradient: Whether a row that is looked up changes even if its gradient is 0.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: DType,
        optimizer: Optimizer,
        settings: FusedSettings,
        device: torch.device,
    ) -> None:
        self.weights_ND = huge_zeros(num_rows * dim, TORCH_DTYPES[dtype], device).view(num_rows, dim)
        self._rule = _Rule(optimizer, settings)
        self.moments = {
            one.name: torch.zeros(
                (num_rows,) if one.is_per_row else (num_rows, dim), dtype=torch.float32, device=device
            )
            for one in optimizer.moments
        }
        self.marks_N = torch.zeros(num_rows, dtype=torch.uint8, device=device) if settings.marks_rows else None
        self.moves_without_gradient = settings.moves_without_gradient(optimizer)
        # Of one seed, so that all copies, which get the same updates, draw the same.
        self._noise: torch.Generator | None = None
        if rounds_at_random(dtype, device):
            self._noise = torch.Generator(device).manual_seed(settings.seed)

    @property
    def state(self) -> RowStates:
        """Weights, moments and marks."""
        return RowStates(self.weights_ND, self.moments, self.marks_N)

    def sums(
        self, rows_L: torch.Tensor, lengths_X: torch.Tensor, weights_L: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums over bags, of rows times their weights if there are some; fp32 of shape (X, D)."""
        offsets, table_ND = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_X.long()), self.weights_ND
        if table_ND.dtype is not torch.float32:
            rows_L, table_ND = torch.arange(len(rows_L), device=rows_L.device), self.rows(rows_L)
        return embedding_bag(
            rows_L, table_ND, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights_L
        )

    def rows(self, rows_L: torch.Tensor) -> torch.Tensor:
        """Rows, fp32 of shape (L, D)."""
        return self.weights_ND.index_select(0, rows_L).float()

    def update(
        self,
        rows_U: torch.Tensor | None,
        gradients_UD: torch.Tensor,
        step: UpdateStep,
        hits_U: torch.Tensor | None = None,
    ) -> None:
        """Takes a step of the optimizer for some rows, each with its whole gradient.

        Args:
            rows_U: Distinct rows; None for all.
            gradients_UD: Their gradients, fp32.
            step: That of the lookup.
            hits_U: Whether each was looked up, where rows move without a gradient; None for all of them. Others, and
                where they do not move without one all whose gradient is 0, stay as they are.
        """
        is_bad = None if step.verdict is None else step.verdict.is_bad
        if self.moves_without_gradient and is_bad is not None:
            hits_U = ~is_bad.expand(len(gradients_UD)) if hits_U is None else hits_U & ~is_bad
        if rows_U is not None:
            self._update(rows_U, gradients_UD, step, hits_U)
            return
        num_rows, dim = gradients_UD.shape
        size = max(1, _VALUES_AT_ONCE // dim)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            self._update(rows, gradients_UD[rows], step, None if hits_U is None else hits_U[rows])

    def _update(
        self,
        rows_U: torch.Tensor | slice,
        gradients_UD: torch.Tensor,
        step: UpdateStep,
        hits_U: torch.Tensor | None,
    ) -> None:
        if self.marks_N is not None:
            marked_U = hits_U if self.moves_without_gradient else gradients_UD.any(dim=1)
            self.marks_N[rows_U] |= UPDATED if marked_U is None else marked_U.to(torch.uint8) * UPDATED
        before_UD = self.weights_ND[rows_U].float()
        moments = {name: one[rows_U] for name, one in self.moments.items()}
        changed_UD, changed = self._rule(before_UD, moments, gradients_UD, step)
        if hits_U is not None:
            changed_UD = torch.where(hits_U[:, None], changed_UD, before_UD)
            changed = {
                name: torch.where(hits_U if one.dim() == 1 else hits_U[:, None], one, moments[name])
                for name, one in changed.items()
            }
        for name, one in changed.items():
            self.moments[name][rows_U] = one
        if self._noise is not None:
            changed_UD = half_at_random(changed_UD, self._noise)
        self.weights_ND[rows_U] = changed_UD.to(self.weights_ND.dtype)


class _Rule:
    """What an optimizer makes of rows and their gradients.

    Source:
        FBGEMM 1.8, `codegen/genscript/optimizers.py`: row-wise moments take the mean of the squared gradient over a
        row, epsilon is added outside of the root, and the decay of Adam and LAMB is decoupled. Differs: LAMB divides by
        the norm of its step, which is 0 for a row that is first looked up without a gradient; FBGEMM's kernel makes
        such a row NaN, here it stays.
    """

    def __init__(self, optimizer: Optimizer, settings: FusedSettings) -> None:
        self._optimizer, self._settings, self._scale = optimizer, settings, settings.scale_of(optimizer)
        self._is_l2 = settings.weight_decay_mode is WeightDecayMode.L2

    def __call__(
        self,
        weights_UD: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
        gradients_UD: torch.Tensor,
        step: UpdateStep,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights, fp32, and moments after a step."""
        settings = self._settings
        if settings.weight_decay and self._is_l2:
            gradients_UD = gradients_UD + settings.weight_decay * weights_UD
        changed: dict[str, torch.Tensor] = {}
        direction_UD = gradients_UD
        if self._optimizer.divides_by_sums:
            changed["moments"] = sums = moments["moments"] + _squares(gradients_UD, moments["moments"])
            direction_UD = gradients_UD / _by_rows(sums.sqrt() + settings.eps * self._scale)
        elif self._optimizer.has_decaying_moments:
            changed["moments"] = first_UD = _mean(moments["moments"], gradients_UD, settings.beta1)
            squares = _squares(gradients_UD, moments["second_moments"])
            changed["second_moments"] = second = _mean(moments["second_moments"], squares, settings.beta2)
            roots = (second / (1.0 - settings.beta2**step.number)).sqrt() + settings.eps
            direction_UD = first_UD / (1.0 - settings.beta1**step.number) / _by_rows(roots)
        rate = step.learning_rate * self._scale
        if settings.weight_decay and not self._is_l2:
            direction_UD = direction_UD + settings.weight_decay / self._scale * weights_UD
        if self._optimizer.scales_by_norms:
            norms_U1 = direction_UD.norm(dim=1, keepdim=True)
            ratios_U1 = weights_UD.norm(dim=1, keepdim=True) / norms_U1
            direction_UD = direction_UD * torch.where(norms_U1 > 0, ratios_U1, 0.0)
        changed_UD = weights_UD - rate * direction_UD
        if settings.max_norm is not None:
            norms_U1 = changed_UD.norm(dim=1, keepdim=True)
            changed_UD = torch.where(
                norms_U1 > settings.max_norm, changed_UD * (settings.max_norm / norms_U1), changed_UD
            )
        return changed_UD, changed


def _squares(gradients_UD: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """What moments take: squared gradients or, of one a row, their means over the row."""
    squares_UD = gradients_UD.square()
    return squares_UD.mean(dim=1) if moments.dim() == 1 else squares_UD


def _mean(moments: torch.Tensor, new: torch.Tensor, kept: float) -> torch.Tensor:
    return kept * moments + (1.0 - kept) * new


def _by_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of rows so that they go with (U, D)."""
    return numbers[:, None] if numbers.dim() == 1 else numbers


def half_at_random(values: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """fp32 values in fp16, each one of its two neighbours there, with the value as the mean.

    fp16 keeps 10 of the 23 bits of an fp32 fraction: a random number of the 13 others is added before they are cut off.
    Below 6e-5, where fp16 keeps fewer, the last bits are rounded to the nearest.
    """
    cut = 1 << 13
    bits = values.view(torch.int32)
    drawn = torch.randint(cut, bits.shape, generator=noise, dtype=torch.int32, device=bits.device)
    return (bits + drawn).bitwise_and_(-cut).view(torch.float32).half()


def summed_by_place(
    places_L: torch.Tensor, num_places: int, source_L: torch.Tensor, gradients_XD: torch.Tensor
) -> torch.Tensor:
    """Sums of gradients for each place, 0 where there are none; shape (num_places, D).

    Args:
        places_L: Place of every lookup.
        num_places: How many places there are.
        source_L: The gradient that the lookup passes on.
        gradients_XD: Gradients of bags or of lookups.
    """
    order_L = places_L.sort(stable=True).indices
    ones_L = torch.ones_like(places_L, dtype=torch.int64)
    counts = ones_L.new_zeros(num_places).scatter_add_(0, places_L.long(), ones_L)
    return embedding_bag(source_L[order_L], gradients_XD, counts.cumsum(0) - counts, mode="sum")


def weighted(
    source_L: torch.Tensor, gradients_XD: torch.Tensor, weights_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weighted lookups, each its own: which one each passes on, and all of them, (L, D).

    Args:
        source_L: The gradient of the bag that each lookup is in.
        gradients_XD: Gradients of bags.
        weights_L: Weights of the lookups.
    """
    return torch.arange(len(source_L), device=source_L.device), gradients_XD[source_L] * weights_L[:, None]


def side_by_side(sums_XD: torch.Tensor, num_features: int, B: int) -> torch.Tensor:
    """Sums of features one below the other, as columns of the bags' samples."""
    if num_features == 1:
        return sums_XD
    dim = sums_XD.shape[1]
    return sums_XD.view(num_features, B, dim).transpose(0, 1).reshape(B, num_features * dim)


def one_below_the_other(block_BW: torch.Tensor, num_features: int) -> torch.Tensor:
    """The reverse of `side_by_side`."""
    if num_features == 1:
        return block_BW
    B = len(block_BW)
    dim = block_BW.shape[1] // num_features
    return block_BW.reshape(B, num_features, dim).transpose(0, 1).reshape(num_features * B, dim)


class _Lookup(NamedTuple):
    """What is looked up in one table: bags of features in turn, or rows."""

    rows_L: torch.Tensor
    lengths_X: torch.Tensor | None
    num_features: int
    weights_L: torch.Tensor | None = None


class TorchKernel:
    """Tables that torch looks up, and updates in the backward pass; as `FusedKernel`.

    Args:
        sizes: Rows and columns of its tables.
        dtype: Of the weights.
        optimizer: Of all tables.
        settings: Of its updates.
        device: Where to hold them.
        table_of_feature: For each feature the table that it looks up, rising; None where rows of the first table are
            given out.
    """

    fills_ahead = False

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        dtype: DType,
        optimizer: Optimizer,
        settings: FusedSettings,
        device: torch.device,
        table_of_feature: Sequence[int] | None = None,
    ) -> None:
        self._tables = [TorchRows(num_rows, dim, dtype, optimizer, settings, device) for num_rows, dim in sizes]
        of = [] if table_of_feature is None else list(table_of_feature)
        self._features_T = [of.count(table) for table in range(len(sizes))]
        self.step = UpdateStep(settings.learning_rate, 1)
        # Autograd goes back to what has an input that takes gradients.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def sums(
        self, ids_L: torch.Tensor, lengths_FG: torch.Tensor, weights_L: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums over bags, of rows times their weights if there are some; shape (G, O)."""
        lookups, at, first = [], 0, 0
        counts_F = lengths_FG.sum(dim=1).tolist()
        for num_features in self._features_T:
            last = first + num_features
            own = slice(at, at + sum(counts_F[first:last]))
            weights = None if weights_L is None else weights_L[own]
            lookups.append(_Lookup(ids_L[own], lengths_FG[first:last].reshape(-1), num_features, weights))
            at, first = own.stop, last
        output: torch.Tensor = _LookUp.apply(self._anchor, self, lookups)  # type: ignore[no-untyped-call]
        return output

    def rows(self, ids_L: torch.Tensor) -> torch.Tensor:
        """Rows, of shape (L, D)."""
        output: torch.Tensor = _LookUp.apply(self._anchor, self, [_Lookup(ids_L, None, 1)])  # type: ignore[no-untyped-call]
        return output

    def look_up(self, lookups: Sequence[_Lookup]) -> torch.Tensor:
        """What is asked for, side by side."""
        found = []
        for table, one in zip(self._tables, lookups, strict=True):
            if one.lengths_X is None:
                found.append(table.rows(one.rows_L))
            else:
                sums_XD = table.sums(one.rows_L, one.lengths_X, one.weights_L)
                found.append(side_by_side(sums_XD, one.num_features, len(one.lengths_X) // one.num_features))
        return torch.cat(found, dim=1)

    def update(self, lookups: Sequence[_Lookup], gradients: torch.Tensor, step: UpdateStep) -> None:
        """Updates the rows that were looked up."""
        widths = [
            one.num_features * table.weights_ND.shape[1] for table, one in zip(self._tables, lookups, strict=True)
        ]
        for table, one, block in zip(self._tables, lookups, torch.split(gradients.float(), widths, dim=1), strict=True):
            gradients_XD = one_below_the_other(block, one.num_features)
            sources_L = torch.arange(len(gradients_XD), device=gradients_XD.device)
            if one.lengths_X is not None:
                sources_L = torch.repeat_interleave(sources_L, one.lengths_X, output_size=len(one.rows_L))
            if one.weights_L is not None:
                sources_L, gradients_XD = weighted(sources_L, gradients_XD, one.weights_L)
            sorted_L, order_L = one.rows_L.sort(stable=True)
            rows_U, counts_U = torch.unique_consecutive(sorted_L, return_counts=True)
            starts_U = counts_U.cumsum(0) - counts_U
            table.update(rows_U, embedding_bag(sources_L[order_L], gradients_XD, starts_U, mode="sum"), step)

    def set_step(self, step: UpdateStep) -> None:
        """Sets the step of lookups from now on; those that were made keep theirs."""
        self.step = step

    def states(self, *, writes: bool) -> list[RowStates]:
        """State of the tables.

        Args:
            writes: Whether it is written to.
        """
        del writes  # No row is cached elsewhere.
        return [one.state for one in self._tables]


class _LookUp(torch.autograd.Function):
    """Looks rows up; its backward pass updates them."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, kernel: TorchKernel, lookups: Sequence[_Lookup]) -> torch.Tensor:
        ctx.kernel, ctx.lookups, ctx.step = kernel, lookups, kernel.step
        return kernel.look_up(lookups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.kernel.update(ctx.lookups, gradients, ctx.step)
        return None, None, None
