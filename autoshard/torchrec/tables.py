"""The tables of a TorchRec model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from autoshard.core import TableSet
from autoshard.formats.torchrec.modules import read_model

_log = logging.getLogger(__name__)


def tables_of(model: torch.nn.Module, **settings: Any) -> TableSet:
    """The tables of every `EmbeddingBagCollection` and `EmbeddingCollection` in a model.

    What of the model the tables do not say goes to the log, a warning each.

    Args:
        model: The model; its weights may be on the meta device.
        settings: `batch_size` over all ranks, `pooling_factor` of features whose constraints do not say it, TorchRec's
            `constraints` by table and its `sharders`; see `read_model`.

    Raises:
        InvalidTableError: If there are no tables, or the model has what plans cannot hold; the field names it.
    """
    found = read_model(model, **settings)
    for note in found.notes:
        _log.warning("%s", note)
    return found.tables
