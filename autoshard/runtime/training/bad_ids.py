"""Ids of samples that no table has a row for.

Shape suffixes: F features, B samples of a local batch, L lookups.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.core import TableSet
from autoshard.core.choices import BadIds
from autoshard.runtime.training.synthetic import Samples


class IdRepair:
    """Makes batches that can be looked up of those with ids that are no rows, and counts these ids.

    Args:
        tables: Tables whose features are looked up.
        policy: What becomes of them; `error` leaves them to the lookup, which refuses the batch.

    Attributes:
        num_bad: Ids that were found.
    """

    def __init__(self, tables: TableSet, policy: BadIds) -> None:
        self._policy, self.num_bad = policy, 0
        rows_F = [table.num_embeddings for table in tables.tables for _ in table.features]
        self._rows_F = torch.tensor(rows_F)

    def __call__(self, samples: Samples) -> Samples:
        """The batch itself, or one that can be looked up; the host waits for the device where it lies on one."""
        if self._policy is BadIds.ERROR:
            return samples
        lengths_FB, ids_L = samples.ids.lengths_FB.long(), samples.ids.ids_L
        rows_F = self._rows_F.to(ids_L.device)
        rows_L = torch.repeat_interleave(rows_F, lengths_FB.sum(dim=1), output_size=len(ids_L))
        is_bad_L = (ids_L < 0) | (ids_L >= rows_L)
        num_bad = int(is_bad_L.sum())
        if not num_bad:
            return samples
        self.num_bad += num_bad
        if self._policy is BadIds.CLIP:
            clipped_L = ids_L.clamp(min=0).minimum((rows_L - 1).to(ids_L.dtype))
            return replace(samples, ids=replace(samples.ids, ids_L=clipped_L))
        F, B = lengths_FB.shape
        bags_L = torch.repeat_interleave(torch.arange(F * B, device=ids_L.device), lengths_FB.reshape(-1))
        if self._policy is BadIds.IGNORE:
            left_out = torch.bincount(bags_L[is_bad_L], minlength=F * B).view(F, B)
            return replace(samples, ids=samples.ids.changed(lengths_FB - left_out, lambda of_L: of_L[~is_bad_L]))
        keeps_B = torch.ones(B, dtype=torch.bool, device=ids_L.device)
        keeps_B[bags_L[is_bad_L] % B] = False
        return Samples(
            ids=samples.ids.changed(samples.ids.lengths_FB[:, keeps_B], lambda of_L: of_L[keeps_B[bags_L % B]]),
            dense_BN=samples.dense_BN[keeps_B],
            labels_B=samples.labels_B[keeps_B],
            # The mean loss is over the samples that are left: those left out count as samples without a loss.
            weight=samples.weight * int(keeps_B.sum()) / B,
        )
