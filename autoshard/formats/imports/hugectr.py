"""HugeCTR's models: the JSON that its configurations are written in, and that `Model.graph_to_json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import TableSet
from autoshard.core.errors import FormatError
from autoshard.formats.documents.fields import at_path, check_object, items, text, whole, word
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.documents.tables_json import (
    MAX_BATCH_SIZE,
    MAX_EMBEDDING_DIM,
    MAX_POOLING_FACTOR,
    MAX_ROWS,
    MAX_TABLES,
    tables_from_json,
)

_EMBEDDINGS: Final = (
    "DistributedSlotSparseEmbeddingHash",
    "LocalizedSlotSparseEmbeddingHash",
    "LocalizedSlotSparseEmbeddingOneHot",
)
_DATA: Final = "Data"
_HPARAM: Final = "sparse_embedding_hparam"
_OPTIMIZERS: Final = {"SGD": "sgd", "AdaGrad": "adagrad", "Adam": "adam"}
#: Words and their numbers in older versions.
_POOLINGS: Final = {"sum": "sum", "mean": "mean", "0": "sum", "1": "mean"}


def is_hugectr(document: object) -> bool:
    """Whether a JSON document is a model of HugeCTR: an object with a list of layers."""
    return isinstance(document, dict) and isinstance(document.get("layers"), list)


def read_hugectr(path: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of a model of HugeCTR.

    A sparse embedding with a `slot_size_array` is a table per slot; one with a `vocabulary_size` is a table that all of
    its slots share. The ids per sample that the data layer says are upper limits, and are taken for the mean. Rows are
    taken to be looked up alike.

    Args:
        path: JSON file.
        batch_size: Global batch; None for the solver's.

    Raises:
        FormatError: If the file is no such model, or says of an embedding neither rows nor dimension.
    """
    document = check_object(read_json(path), "model")
    layers = [check_object(one, f"layers[{n}]") for n, one in enumerate(items(document.get("layers"), "layers"))]
    slots = dict(_slots(layers))
    optimizer = _optimizer(document.get("optimizer"), "optimizer")
    tables: list[dict[str, object]] = []
    for number, layer in enumerate(layers):
        if any(layer.get("type") == kind for kind in _EMBEDDINGS):
            made = at_path(f"layers[{number}]", partial(_tables, layer, slots, layers, optimizer))
            tables += made
    if not tables:
        raise FormatError(f"must hold an embedding: {', '.join(_EMBEDDINGS)}", field="layers")
    batch = batch_size or _batch_size(document)
    return tables_from_json({"schema": "autoshard.tables/1", "batch_size": batch, "tables": tables})


def _batch_size(document: Mapping[str, object]) -> int:
    solver = check_object(document.get("solver", {}), "solver")
    if "batchsize" not in solver:
        raise FormatError("is missing; the option batch_size says it, too", field="solver.batchsize")
    return whole(solver["batchsize"], "solver.batchsize", minimum=1, maximum=MAX_BATCH_SIZE)


def _optimizer(value: object, path: str) -> str:
    if value is None:
        return "sgd"
    return word(check_object(value, path).get("type", "SGD"), f"{path}.type", _OPTIMIZERS)


def _slots(layers: list[dict[str, object]]) -> Iterator[tuple[str, list[float]]]:
    """Sparse inputs by name: ids per sample of each of their slots."""
    for number, layer in enumerate(layers):
        if layer.get("type") != _DATA:
            continue
        for position, given in enumerate(items(layer.get("sparse"), f"layers[{number}].sparse")):
            path = f"layers[{number}].sparse[{position}]"
            sparse = check_object(given, path)
            lookups = at_path(path, partial(_lookups, sparse))
            yield text(sparse.get("top"), f"{path}.top"), lookups


def _lookups(sparse: Mapping[str, object]) -> list[float]:
    """Ids per sample of each slot, from the first field that says them."""
    num_slots = whole(sparse.get("slot_num"), "slot_num", minimum=1, maximum=MAX_TABLES)
    most = int(MAX_POOLING_FACTOR)
    listed = sparse.get("nnz_per_slot", sparse.get("max_nnz"))
    if isinstance(listed, list):
        given = items(listed, "nnz_per_slot", minimum=num_slots, maximum=num_slots)
        return [float(whole(one, f"nnz_per_slot[{n}]", maximum=most)) for n, one in enumerate(given)]
    if listed is not None:
        return [float(whole(listed, "nnz_per_slot", maximum=most))] * num_slots
    total = whole(sparse.get("max_feature_num_per_sample"), "max_feature_num_per_sample", maximum=most)
    return [total / num_slots] * num_slots


def _tables(
    layer: Mapping[str, object], slots: Mapping[str, list[float]], layers: list[dict[str, object]], optimizer: str
) -> list[dict[str, object]]:
    """Tables of one sparse embedding, as objects of tables.json."""
    name, bottom = text(layer.get("top"), "top"), text(layer.get("bottom"), "bottom")
    if bottom not in slots:
        raise FormatError(
            f"must be a sparse input of the data layer: {', '.join(slots) or 'there is none'}", field="bottom"
        )
    lookups, hparam = slots[bottom], check_object(layer.get(_HPARAM), _HPARAM)
    shared: dict[str, Any] = {
        "embedding_dim": whole(
            hparam.get("embedding_vec_size"), f"{_HPARAM}.embedding_vec_size", minimum=1, maximum=MAX_EMBEDDING_DIM
        ),
        "dtype": "fp32",
        "pooling": word(str(hparam.get("combiner", "sum")), f"{_HPARAM}.combiner", _POOLINGS),
        "optimizer": _optimizer(layer["optimizer"], "optimizer") if "optimizer" in layer else optimizer,
        "access": {"kind": "uniform"},
    }
    features = [{"name": f"{name}_{slot}", "pooling_factor": factor} for slot, factor in enumerate(lookups)]
    sizes = _slot_sizes(hparam, layers, len(lookups))
    if sizes is None:
        rows = whole(hparam.get("vocabulary_size"), f"{_HPARAM}.vocabulary_size", minimum=1, maximum=MAX_ROWS)
        return [{"name": name, "num_embeddings": rows, "features": features, **shared}]
    return [
        {"name": feature["name"], "num_embeddings": rows, "features": [feature], **shared}
        for feature, rows in zip(features, sizes, strict=True)
    ]


def _slot_sizes(hparam: Mapping[str, object], layers: list[dict[str, object]], num_slots: int) -> list[int] | None:
    """Rows of each slot, by the embedding or else by the data layer; None where only their sum is known."""
    field, given = f"{_HPARAM}.slot_size_array", hparam.get("slot_size_array")
    if given is None and "vocabulary_size" not in hparam:
        field = "slot_size_array"
        given = next((one[field] for one in layers if one.get("type") == _DATA and field in one), None)
        if given is None:
            raise FormatError("must have a slot_size_array or a vocabulary_size", field=_HPARAM)
    if given is None:
        return None
    listed = items(given, field, minimum=num_slots, maximum=num_slots)
    return [whole(one, f"{field}[{n}]", minimum=1, maximum=MAX_ROWS) for n, one in enumerate(listed)]
