"""Access profiles of real traffic, counted while a model trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from autoshard.core import EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.access import mixture
from autoshard.core.errors import InputError
from autoshard.formats import write_tables
from autoshard.formats.imports.id_batches import FeatureCounts
from autoshard.formats.torchrec.modules import read_model

#: Steps between two that are counted: counting a step's ids takes longer than the step's own lookups.
_EVERY = 100


class Recorder:
    """Counts the ids that a model looks up; made by `record`.

    Args:
        tables: The model's tables.
        features: For each feature of the tables, its name in the model's batches.
        every: A forward pass in this many is counted, the first one included.
    """

    def __init__(self, tables: TableSet, features: Mapping[str, str], every: int) -> None:
        WHOLE_AT_LEAST_1.check(every, "every")
        self._tables, self._features, self._every = tables, dict(features), every
        self._counts: dict[str, FeatureCounts] = {}
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
        if not self._counts:
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
        wanted = set(self._features.values())
        for name, bags in batch.to_dict().items():
            if name in wanted:
                ids_L = bags.values().detach().cpu().numpy().astype(np.int64)
                lengths_B = bags.lengths().detach().cpu().numpy().astype(np.int64)
                if len(lengths_B):
                    self._counts.setdefault(name, FeatureCounts()).add(ids_L, lengths_B)

    def _recorded(self, table: EmbeddingTable) -> EmbeddingTable:
        seen: dict[str, EmbeddingTable] = {}
        for feature in table.features:
            counts = self._counts.get(self._features[feature.name])
            if counts is not None:
                seen[feature.name] = counts.table(feature.name, table.embedding_dim, table.num_embeddings)
        if not seen:
            return table
        features = tuple(self._feature(feature, seen.get(feature.name)) for feature in table.features)
        weighted = [(one.access, one.pooling_factor) for one in seen.values() if one.pooling_factor > 0]
        access = table.access if not weighted else weighted[0][0] if len(weighted) == 1 else mixture(weighted)
        return replace(table, features=features, access=access)

    @staticmethod
    def _feature(feature: Feature, counted: EmbeddingTable | None) -> Feature:
        return feature if counted is None else replace(counted.features[0], name=feature.name)


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
