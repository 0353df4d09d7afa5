"""Access profiles of real traffic, counted while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from autoshard.core import EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown
from autoshard.formats import write_tables
from autoshard.formats.imports.id_batches import FeatureCounts
from autoshard.formats.torchrec.modules import Collection, ModelTables, read_model
from autoshard.torchrec.sharded import ShardedCollection

#: Steps between two that are counted: counting a step's ids takes longer than the step's own lookups.
_EVERY = 100
_NONE = np.zeros(0, dtype=np.int64)
#: By the features' names in batches: tables that look them up, and the features' names there.
_LookedUp: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]

_log = logging.getLogger(__name__)


class Recorder:
    """Counts the ids that a model looks up, by table, and bag lengths by feature; made by `record`.

    A table with too many distinct ids has those of its next batches left out, with a warning.

    Args:
        found: The model's tables, and where they are.
        every: A forward pass in this many is counted, the first one included.
    """

    def __init__(self, found: ModelTables, every: int) -> None:
        WHOLE_AT_LEAST_1.check(every, "every")
        self._tables, self._every = found.tables, every
        #: By the paths of each module. Modules themselves are not kept: others may take their places.
        self._looked_up = {one.paths: _looked_up(one, found.tables) for one in found.collections}
        #: Bag lengths by feature, and ids by table.
        self._lengths: dict[str, FeatureCounts] = {}
        self._rows: dict[str, FeatureCounts] = {}
        self._full: set[str] = set()
        #: By watched place.
        self._num_calls: list[int] = []
        self._handles: list[Any] = []
        self._num_counted = 0

    @property
    def num_counted(self) -> int:
        """Batches that were counted."""
        return self._num_counted

    def watch(self, module: torch.nn.Module, *, path: str | None = None, calls_per_pass: int | None = None) -> None:
        """Counts the ids that a module is given from now on.

        Args:
            module: The module.
            path: A path of the model's module whose place it takes. None for that of a module which `shard` made; of
                others it may be left out if no feature is looked up in several modules.
            calls_per_pass: Calls of it in a forward pass of the model, which are counted together; None for one at each
                path of the model's module, or for one where the path is left out.

        Raises:
            InputError: If there is no module of tables at the path, or the path must be given.
        """
        if path is None and isinstance(module, ShardedCollection):
            path = module.paths[0]
        accepted = ", ".join(shown(paths[0]) for paths in self._looked_up)
        places = [paths for paths in self._looked_up if path is None or path in paths]
        if not places:
            raise InputError(f"must be one of {accepted}, got {shown(path)}", field="path")
        looked_up: dict[str, Sequence[tuple[str, str]]] = {}
        for paths in places:
            for name, features in self._looked_up[paths].items():
                if name in looked_up:
                    raise InputError(
                        f"must be given, one of {accepted}, since several look up feature {shown(name)}", field="path"
                    )
                looked_up[name] = features
        usual = 1 if path is None else len(places[0])
        see = partial(self._see, looked_up, calls_per_pass or usual, len(self._num_calls))
        self._num_calls.append(0)
        # After the pass: a batch that is refused is not counted, and nothing fails here that other processes wait for.
        self._handles.append(module.register_forward_hook(see, with_kwargs=True))

    def tables(self) -> TableSet:
        """The tables with the access profiles and bag lengths of what was counted; others stay as they were."""
        return replace(self._tables, tables=tuple(self._recorded(table) for table in self._tables.tables))

    def write(self, path: str | Path) -> None:
        """Writes `tables` as a tables.json.

        Raises:
            InputError: If nothing was counted.
            FormatError: If no file can be written there.
        """
        if not self._lengths:
            raise InputError("has counted no batch: nothing that it watches was called", field="recorder")
        write_tables(self.tables(), path)

    def close(self) -> None:
        """Stops counting; what was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see(
        self,
        looked_up: _LookedUp,
        calls_per_pass: int,
        watch: int,
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _output: object,
    ) -> None:
        call = self._num_calls[watch]
        self._num_calls[watch] += 1
        if call // calls_per_pass % self._every:
            return
        for value in (*args, *kwargs.values()):
            batch = maybe_td_to_kjt(value, None)
            if isinstance(batch, KeyedJaggedTensor):
                self._count(batch, looked_up)

    def _count(self, batch: KeyedJaggedTensor, looked_up: _LookedUp) -> None:
        """Counts a batch: its ids are copied to the host here."""
        self._num_counted += 1
        for name, bags in batch.to_dict().items():
            if name not in looked_up:
                continue
            ids_L = bags.values().detach().cpu().numpy().astype(np.int64)
            lengths_B = bags.lengths().detach().cpu().numpy().astype(np.int64)
            if not len(lengths_B):
                continue
            for table, feature in looked_up[name]:
                self._lengths.setdefault(feature, FeatureCounts()).add(_NONE, lengths_B)
                self._count_rows(table, ids_L)

    def _count_rows(self, table: str, ids_L: NDArray[np.int64]) -> None:
        if table in self._full:
            return
        try:
            self._rows.setdefault(table, FeatureCounts()).add(ids_L, _NONE)
        except FormatError:
            self._full.add(table)
            _log.warning("table %s has too many distinct ids: it is counted no more", shown(table))

    def _recorded(self, table: EmbeddingTable) -> EmbeddingTable:
        rows = self._rows.get(table.name)
        access = None if rows is None else rows.access(table.num_embeddings)
        features = tuple(self._feature(feature, table) for feature in table.features)
        return replace(table, features=features, access=access or table.access)

    def _feature(self, feature: Feature, table: EmbeddingTable) -> Feature:
        counted = self._lengths.get(feature.name)
        if counted is None:
            return feature
        return counted.table(feature.name, table.embedding_dim, table.num_embeddings).features[0]


def record(model: torch.nn.Module, *, every: int = _EVERY, **settings: Any) -> Recorder:
    """Counts the ids that a model's tables look up, by a hook after the forward pass of each of their modules.

    Call it before the model is sharded by TorchRec, on the model that the tables come from; pass modules that stand in
    their place to `Recorder.watch`. Each process counts its own batches.

    Args:
        model: The model.
        every: A forward pass in this many is counted: counting takes time.
        settings: As `tables_of` takes them.

    Raises:
        InvalidTableError: As `tables_of`.
    """
    found = read_model(model, **settings)
    recorder = Recorder(found, every)
    for one in found.collections:
        recorder.watch(one.module, path=one.path)
    return recorder


def _looked_up(collection: Collection, tables: TableSet) -> _LookedUp:
    looked_up: dict[str, list[tuple[str, str]]] = {}
    for table, config in zip(collection.tables, collection.configs, strict=True):
        for name, feature in zip(config.feature_names, tables[table].features, strict=True):
            looked_up.setdefault(name, []).append((table, feature.name))
    return looked_up
