"""Rows that were updated since they were last saved.

Shape suffixes: N rows, D columns of a holding, L updated rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.runtime.engine.holdings import Holding
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.rows.averaging import UNAVERAGED, UNSAVED, RowStates
from autoshard.runtime.engine.rows.places import held_chunks


@dataclass(frozen=True, slots=True, eq=False)
class UpdatedRows:
    """State of some rows of a table in the memory of the host, in some of its columns.

    Attributes:
        table: Name of the table.
        columns: First column, and the column after the last.
        ids_L: Row ids, int64.
        weights_LD: Their weights.
        moments: Their moments by name, (L,) for one a row, else (L, D).
    """

    table: str
    columns: tuple[int, int]
    ids_L: torch.Tensor
    weights_LD: torch.Tensor
    moments: Mapping[str, torch.Tensor]


def updated_rows(
    held: Mapping[int, RowStates], holdings: Sequence[Holding], process: int, orders: Mapping[str, RowOrderMap]
) -> Iterator[UpdatedRows]:
    """Rows of a process that are marked as updated since they were last saved, of each holding.

    Rows that several processes hold are given by the first of them.

    Args:
        held: What the process has, by number of the holding.
        holdings: All holdings.
        process: The process.
        orders: Row orders, by table.
    """
    for index, state in held.items():
        holding = holdings[index]
        if state.marks_N is None or any(process in of[1:] for of in holding.sync_groups()):
            continue
        ids, places = [], []
        order = orders.get(holding.of.name)
        for start, rows_L, places_L in held_chunks(holding, process, order, range(holding.of.num_embeddings)):
            is_updated_L = (state.marks_N[places_L.to(state.marks_N.device)] & UNSAVED).bool().cpu()
            ids.append(rows_L[is_updated_L] + start)
            places.append(places_L[is_updated_L])
        if not any(map(len, ids)):
            continue
        places_L = torch.cat(places).to(state.weights_ND.device)
        yield UpdatedRows(
            table=holding.of.name,
            columns=holding.columns,
            ids_L=torch.cat(ids),
            weights_LD=state.weights_ND[places_L].detach().cpu(),
            moments={name: one[places_L].detach().cpu() for name, one in state.moments.items()},
        )


def forget_updates(held: Mapping[int, RowStates]) -> None:
    """Takes all rows as saved."""
    for state in held.values():
        if state.marks_N is not None:
            state.marks_N.bitwise_and_(UNAVERAGED)
