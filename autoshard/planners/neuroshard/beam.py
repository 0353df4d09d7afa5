"""Beam search over column-wise halvings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.planners.neuroshard.capped_greedy import CappedGreedy, Packed, num_dims
from autoshard.planners.space.options import COLUMN_STEP, ShardingOption, ShardingType
from autoshard.planners.space.planner_space import ItemShard, PlannerSpace

#: A shard of an item: the item and how often its columns were halved.
Piece = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeamResult:
    """The best plan of a search.

    Attributes:
        pieces: Shards of all items, those of an item in the order of its columns.
        packed: Their ranks, and the step.
        first_ms: The step with all tables whole; None if they fit under no cap.
        num_steps: Steps that the beam made.
    """

    pieces: tuple[Piece, ...]
    packed: Packed
    first_ms: float | None
    num_steps: int

    @property
    def step_ms(self) -> float:
        """The predicted step."""
        return self.packed.step_ms


class BeamSearch:
    """NeuroShard's outer loop: each step halves the columns of one more shard, and the best few candidates go on.

    Shards are candidates that are among the costliest, or among those that take most memory; halves keep a multiple of
    four columns. Tables that must share their ranks stay whole. Differs from the paper: candidates that the beam has
    met, in whatever order of halvings, are not packed again, and the search ends with the time limit.

    Args:
        space: Whole tables, one option each.
        greedy: Packs candidates.
        beam_width: Candidates that go on, K in the paper.
        num_candidates: Shards that are halved by cost, and by memory, N in the paper.
        max_steps: Most halvings of one plan, L in the paper.
        min_partition: Least columns of a half; 0 for four.

    Source:
        NeuroShard (Zha et al., MLSys 2023), online search, outer loop: beam search; `shard` of its published code.
    """

    def __init__(
        self,
        space: PlannerSpace,
        greedy: CappedGreedy,
        *,
        beam_width: int,
        num_candidates: int,
        max_steps: int,
        min_partition: int = 0,
    ) -> None:
        self._space, self.greedy = space, greedy
        self._beam_width, self._num_candidates, self._max_steps = beam_width, num_candidates, max_steps
        self._min_partition = min_partition
        self._shards: dict[Piece, ItemShard] = {
            (index, 0): item.options[0].shards[0] for index, item in enumerate(space.items)
        }

    def run(self, deadline_s: float, is_stopped: Callable[[], bool] = lambda: False) -> BeamResult | None:
        """The plan with the shortest predicted step; None if no candidate fits under any cap.

        Args:
            deadline_s: When to end, by `time.perf_counter`; whole tables are packed whatever the time.
            is_stopped: Whether to end now.
        """
        whole = tuple(sorted(self._shards))
        first = self._packed([whole])[0]
        best = None if first is None else (whole, first)
        beam, met, num_steps = [whole], {whole}, 0
        while num_steps < self._max_steps and time.perf_counter() < deadline_s and not is_stopped():
            candidates = list(dict.fromkeys(one for pieces in beam for one in self._halvings(pieces)))
            candidates = [one for one in candidates if one not in met]
            if not candidates:
                break
            met.update(candidates)
            packed = self._packed(candidates)
            beam = self._best_of(candidates, packed)
            num_steps += 1
            for pieces, found in zip(candidates, packed, strict=True):
                if found is not None and (best is None or found.step_ms < best[1].step_ms):
                    best = pieces, found
        if best is None:
            return None
        return BeamResult(
            pieces=best[0], packed=best[1], first_ms=None if first is None else first.step_ms, num_steps=num_steps
        )

    def shards(self, pieces: Sequence[Piece]) -> list[ItemShard]:
        """Shards with the columns that they have in a plan: those of an item one after the other."""
        reached: dict[int, int] = {}
        placed = []
        for piece in pieces:
            shard, first = self._shards[piece], reached.get(piece[0], 0)
            shard = replace(shard, parts=self._space.items[piece[0]].parts(shard))
            if piece[1]:
                part = shard.parts[0]
                columns = (first, first + part.shard.embedding_dim)
                shard = replace(shard, parts=(replace(part, shard=replace(part.shard, columns=columns)),))
                reached[piece[0]] = columns[1]
            placed.append(shard)
        return placed

    def _packed(self, candidates: Sequence[Sequence[Piece]]) -> list[Packed | None]:
        self._learn(dict.fromkeys(piece for pieces in candidates for piece in pieces if piece not in self._shards))
        return self.greedy.pack([[self._shards[piece] for piece in pieces] for pieces in candidates])

    def _best_of(
        self, candidates: Sequence[tuple[Piece, ...]], packed: Sequence[Packed | None]
    ) -> list[tuple[Piece, ...]]:
        """Candidates that go on; those that do not fit go last, since a further halving may make them fit."""
        step_ms = [np.inf if found is None else found.step_ms for found in packed]
        return [candidates[index] for index in np.argsort(step_ms, kind="stable")[: self._beam_width].tolist()]

    def _halvings(self, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
        """The candidate with one more shard halved, for every shard that counts."""
        kinds = self._space.kinds
        kind_P = np.array([self._shards[piece].kind for piece in pieces])
        alone_ms_P = self._space.costs.kernel.predict_ms(kinds.codes_VH[kind_P].astype(np.float32))
        bytes_P = kinds.bytes_VM[kind_P].sum(axis=1)
        orders = [np.argsort(-values_P, kind="stable")[: self._num_candidates] for values_P in (bytes_P, alone_ms_P)]
        chosen = dict.fromkeys(pieces[index] for order in orders for index in order.tolist())
        return [self._halved(pieces, piece) for piece in chosen if self._may_halve(piece)]

    def _may_halve(self, piece: Piece) -> bool:
        shard = self._shards[piece]
        item = self._space.items[piece[0]]
        is_alone = len(item.tables) == 1 and not item.tables[0].constraints.colocate_with
        is_wide = num_dims(shard) >= 2 * self._min_partition
        return is_alone and is_wide and num_dims(shard) % (2 * COLUMN_STEP) == 0

    @staticmethod
    def _halved(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
        item, num_halvings = piece
        left = list(pieces)
        left.remove(piece)
        return tuple(sorted([*left, (item, num_halvings + 1), (item, num_halvings + 1)]))

    def _learn(self, pieces: Sequence[Piece] | dict[Piece, None]) -> None:
        """Encodes new kinds of shards, all in one call of the model."""
        new = {}
        for item, num_halvings in pieces:
            whole = self._shards[item, 0]
            width = num_dims(whole) >> num_halvings
            part = replace(whole.parts[0], shard=replace(whole.parts[0].shard, columns=(0, width)))
            new[item, num_halvings] = part
        self._space.kinds.learn(ShardingOption(name=ShardingType.COLUMN_WISE, parts=(part,)) for part in new.values())
        for (item, num_halvings), part in new.items():
            kind = self._space.kinds.of_parts((part,))
            assert kind is not None, "the model prices the whole table, which is of the same kind"
            self._shards[item, num_halvings] = replace(self._shards[item, 0], parts=(part,), kind=kind)
