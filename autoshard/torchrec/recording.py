"""Access profiles of real traffic, counted while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from autoshard.core import EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown
from autoshard.formats import write_tables
from autoshard.formats.imports.id_batches import FeatureCounts
from autoshard.formats.torchrec.modules import read_model

#: Steps between two that are counted: counting a step's ids takes longer than the step's own lookups.
_EVERY = 100
_NONE = np.zeros(0, dtype=np.int64)

_log = logging.getLogger(__name__)


class Recorder:
    """Counts the ids that a model looks up, by table, and bag lengths by feature; made by `record`.

    A table with too many distinct ids has those of its next batches left out, with a warning.

    Args:
        tables: The model's tables.
        features: For each feature of the tables, its name in the model's batches.
        every: A forward pass in this many is counted, the first one included.
    """

    def __init__(self, tables: TableSet, features: Mapping[str, str], every: int) -> None:
        WHOLE_AT_LEAST_1.check(every, "every")
        self._tables, self._features, self._every = tables, dict(features), every
        #: Bag lengths, by the features' names in batches; and ids, by table.
        self._lengths: dict[str, FeatureCounts] = {}
        self._rows: dict[str, FeatureCounts] = {}
        self._tables_of: dict[str, list[str]] = {}
        for table in tables.tables:
            for feature in table.features:
                self._tables_of.setdefault(self._features[feature.name], []).append(table.name)
        self._full: set[str] = set()
        self._num_calls: dict[int, int] = {}
        self._calls_per_pass: dict[int, int] = {}
        self._handles: list[Any] = []
        self._num_counted = 0

    @property
    def num_counted(self) -> int:
        """Batches that were counted."""
        return self._num_counted

    def watch(self, module: torch.nn.Module, *, calls_per_pass: int = 1) -> None:
        """Counts the ids that a module is given from now on.

        Args:
            module: The module.
            calls_per_pass: Calls of it in a forward pass of the model, which are counted together.
        """
        self._calls_per_pass[id(module)] = calls_per_pass
        # After the pass: a batch that is refused is not counted, and nothing fails here that other processes wait for.
        self._handles.append(module.register_forward_hook(self._see, with_kwargs=True))

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

    def _see(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        call = self._num_calls.get(id(module), 0)
        self._num_calls[id(module)] = call + 1
        if call // self._calls_per_pass[id(module)] % self._every:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, KeyedJaggedTensor):
                self._count(value)

    def _count(self, batch: KeyedJaggedTensor) -> None:
        """Counts a batch: its ids are copied to the host here."""
        self._num_counted += 1
        for name, bags in batch.to_dict().items():
            if name in self._tables_of:
                ids_L = bags.values().detach().cpu().numpy().astype(np.int64)
                lengths_B = bags.lengths().detach().cpu().numpy().astype(np.int64)
                if len(lengths_B):
                    self._lengths.setdefault(name, FeatureCounts()).add(_NONE, lengths_B)
                    self._count_rows(name, ids_L)

    def _count_rows(self, name: str, ids_L: NDArray[np.int64]) -> None:
        for table in self._tables_of[name]:
            if table in self._full:
                continue
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
        counted = self._lengths.get(self._features[feature.name])
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
    names = (name for one in found.collections for config in one.configs for name in config.feature_names)
    own = (feature.name for table in found.tables.tables for feature in table.features)
    recorder = Recorder(found.tables, dict(zip(own, names, strict=True)), every)
    for one in found.collections:
        recorder.watch(one.module, calls_per_pass=len(one.paths))
    return recorder
