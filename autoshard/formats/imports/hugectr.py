"""HugeCTR's models: the JSON that its configurations are written in, and that `Model.graph_to_json` writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import TableSet
from autoshard.core.accepted import MAX_BATCH_SIZE, MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS, MAX_TABLES
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.fields import at_path, check_flag, check_object, items, text, whole, word
from autoshard.formats.documents.json_document import join, read_json
from autoshard.formats.documents.tables_json import tables_from_json

_log = logging.getLogger(__name__)

#: Types of embeddings, of all versions.
_EMBEDDINGS: Final = (
    *("DistributedSlotSparseEmbeddingHash", "LocalizedSlotSparseEmbeddingHash", "LocalizedSlotSparseEmbeddingOneHot"),
    *("HybridSparseEmbedding", "SparseEmbeddingHash", "SparseEmbedding"),
)
_DATA: Final = "Data"
#: The input of models of the first versions, which have no data layer.
_OLD_INPUT: Final = "data"
_INFERENCE: Final = "inference"
_HPARAM: Final = "sparse_embedding_hparam"
_OPTIMIZERS: Final = {"SGD": "sgd", "AdaGrad": "adagrad", "Adam": "adam"}
#: Values that each weight is held with, itself included, in the room of a hash table; Adam's lazy update has one more.
_VALUES: Final = {"sgd": 1, "adagrad": 2, "adam": 3}
#: Words and their numbers in older versions.
_POOLINGS: Final = {"sum": "sum", "mean": "mean", "0": "sum", "1": "mean"}
#: Fields that say the rows of each slot, and all rows together, by age.
_SLOT_ROWS: Final = ("slot_size_array", "slot_size")
_ALL_ROWS: Final = ("vocabulary_size", "max_vocabulary_size", "max_vocabulary_size_global")
_ROOM_ROWS, _ROOM_MIB = "max_vocabulary_size_per_gpu", "workspace_size_per_gpu_in_mb"
#: Fields of an embedding that are read, or that change no table.
_READ: Final = (*_SLOT_ROWS, *_ALL_ROWS, _ROOM_ROWS, _ROOM_MIB, "slot_num", "embedding_vec_size", "combiner")
_OF_NO_TABLE: Final = (
    *("load_factor", "initializer", "communication_type", "hybrid_embedding_type", "num_iterations_statistics"),
    *("max_num_frequent_categories", "max_num_infrequent_samples", "p_dup_max", "max_all_reduce_bandwidth"),
    *("max_all_to_all_bandwidth", "efficiency_bandwidth_ratio", "use_train_precompute_indices"),
    *("use_eval_precompute_indices",),
)


def is_hugectr(document: object) -> bool:
    """Whether a JSON document is a model of HugeCTR: an object with a list of layers."""
    return isinstance(document, dict) and isinstance(document.get("layers"), list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What an embedding's tables depend on besides the embedding.

    Attributes:
        inputs: Ids per sample of each slot, by sparse input.
        slot_rows: Rows of each slot, by sparse input, where the data layer says them.
        optimizer: The model's.
        num_processors: GPUs of the solver.
    """

    inputs: Mapping[str, list[float]]
    slot_rows: Mapping[str, list[int]]
    optimizer: object
    num_processors: int


def read_hugectr(path: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of a model of HugeCTR.

    A sparse embedding has a table for each slot whose rows it or the data layer says; the data layer's sizes run over
    the slots of its sparse inputs in turn. Ids of a slot of size 0 start where those of the next slot start, so that it
    looks up the table of the next slot with rows. Where only all rows together are known, or only the room that
    processors keep for them, they are one table that all slots share, and a warning says so.

    The ids per sample that the data layer says are upper limits, unless `is_fixed_length`, and are taken for the mean.
    Rows are taken to be looked up alike. Weights are fp32, as HugeCTR holds them with `mixed_precision`, too.

    Args:
        path: JSON file.
        batch_size: Global batch; None for the solver's.

    Raises:
        FormatError: If the file is no such model, has an embedding of another type, or says of one neither rows nor
            dimension.
    """
    document = check_object(read_json(path), "model")
    layers = [check_object(one, f"layers[{n}]") for n, one in enumerate(items(document.get("layers"), "layers"))]
    solver = check_object(document.get("solver", {}), "solver")
    inputs = dict(_inputs(layers))
    if _OLD_INPUT in document:
        inputs[_OLD_INPUT] = _lookups(_OLD_INPUT, check_object(document[_OLD_INPUT], _OLD_INPUT))
    model = _Model(
        inputs=inputs,
        slot_rows=_slot_rows_of_data(layers, inputs),
        optimizer=document.get("optimizer"),
        num_processors=_num_processors(solver),
    )
    if (
        model.optimizer is None
        and _INFERENCE not in document
        and any(_is_embedding(layer) and "optimizer" not in layer for layer in layers)
    ):
        _log.warning("optimizer: is missing; the tables are taken to have no optimizer state")
    tables: list[dict[str, object]] = []
    for number, layer in enumerate(layers):
        if _is_embedding(layer):
            tables += at_path(f"layers[{number}]", partial(_tables, f"layers[{number}]", layer, model))
    if not tables:
        raise FormatError(f"must hold an embedding: {', '.join(_EMBEDDINGS)}", field="layers")
    batch = batch_size or _batch_size(document, solver)
    _log.warning("dtype, access: taken for fp32, as HugeCTR holds weights, and for rows that are looked up alike")
    if any(not _is_embedding(layer) and layer.get("type") != _DATA for layer in layers):
        _log.warning("layers: the dense layers are left out of the import")
    return tables_from_json({"schema": "autoshard.tables/1", "batch_size": batch, "tables": tables})


def _is_embedding(layer: Mapping[str, object]) -> bool:
    """Whether a layer has tables, be it of a known type or not."""
    return _HPARAM in layer or "Embedding" in str(layer.get("type"))


def _batch_size(document: Mapping[str, object], solver: Mapping[str, object]) -> int:
    """The batch of training, or the largest one of inference."""
    if _INFERENCE in document:
        given = check_object(document[_INFERENCE], _INFERENCE).get("max_batchsize")
        return whole(given, f"{_INFERENCE}.max_batchsize", minimum=1, maximum=MAX_BATCH_SIZE)
    if "batchsize" not in solver:
        raise FormatError("is missing; the option batch_size says it, too", field="solver.batchsize")
    return whole(solver["batchsize"], "solver.batchsize", minimum=1, maximum=MAX_BATCH_SIZE)


def _num_processors(solver: Mapping[str, object]) -> int:
    """GPUs of the solver, which lists them, or those of each node; 1 if it does not."""
    listed = items(solver.get("gpu", [0]), "solver.gpu")
    return sum(len(one) if isinstance(one, list) else 1 for one in listed) or 1


def _optimizer(value: object, path: str) -> str:
    if value is None:
        return "sgd"
    return word(check_object(value, path).get("type", "SGD"), f"{path}.type", _OPTIMIZERS)


def _inputs(layers: list[dict[str, object]]) -> Iterator[tuple[str, list[float]]]:
    """Sparse inputs by name: ids per sample of each of their slots."""
    for number, layer in enumerate(layers):
        if layer.get("type") != _DATA:
            continue
        for position, given in enumerate(items(layer.get("sparse"), f"layers[{number}].sparse")):
            path = f"layers[{number}].sparse[{position}]"
            sparse = check_object(given, path)
            yield text(sparse.get("top"), f"{path}.top"), _lookups(path, sparse)


def _lookups(path: str, sparse: Mapping[str, object]) -> list[float]:
    """Ids per sample of each slot, from the first field that says them."""
    return at_path(path, partial(_lookups_of_slots, path, sparse))


def _lookups_of_slots(path: str, sparse: Mapping[str, object]) -> list[float]:
    num_slots = whole(sparse.get("slot_num"), "slot_num", minimum=1, maximum=MAX_TABLES)
    most = int(MAX_POOLING_FACTOR)
    field = next((name for name in ("nnz_per_slot", "max_nnz") if name in sparse), "max_feature_num_per_sample")
    listed = sparse.get(field)
    if isinstance(listed, list):
        given = items(listed, field, minimum=num_slots, maximum=num_slots)
        lookups = [float(whole(one, f"{field}[{n}]", maximum=most)) for n, one in enumerate(given)]
    else:
        number = whole(listed, field, maximum=most)
        lookups = [number / num_slots if field == "max_feature_num_per_sample" else float(number)] * num_slots
    if max(lookups) > 1 and not check_flag(sparse.get("is_fixed_length", False), "is_fixed_length"):
        _log.warning("%s.%s: the largest number of ids per sample is taken for the mean", path, field)
    return lookups


def _slot_rows_of_data(layers: list[dict[str, object]], inputs: Mapping[str, list[float]]) -> dict[str, list[int]]:
    """Rows of each slot of each sparse input, from the data layer's list, which runs over the inputs in turn."""
    found: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.get("type") != _DATA:
            continue
        field, rows = _listed(layer, f"layers[{number}]")
        for name, lookups in inputs.items():
            if rows:
                found[name], rows = rows[: len(lookups)], rows[len(lookups) :]
                _check_number(found[name], field, len(lookups))
        _check_number(rows, field, 0)
    return found


def _check_number(rows: list[int], field: str, num_slots: int) -> None:
    if len(rows) != num_slots:
        said = f"must hold a value for each slot of each input in turn, got {len(rows)} for {num_slots} slots"
        raise FormatError(said, field=field)


def _listed(owner: Mapping[str, object], path: str) -> tuple[str, list[int]]:
    """The field in which an object lists the rows of slots, and the rows; none where it does not."""
    name = next((name for name in _SLOT_ROWS if owner.get(name)), _SLOT_ROWS[0])
    field, listed = join(path, name), items(owner.get(name, []), join(path, name), minimum=0)
    return field, [whole(one, f"{field}[{n}]", maximum=MAX_ROWS) for n, one in enumerate(listed)]


def _tables(path: str, layer: Mapping[str, object], model: _Model) -> list[dict[str, object]]:
    """Tables of one sparse embedding, as objects of tables.json."""
    word(layer.get("type"), "type", dict.fromkeys(_EMBEDDINGS))
    name, hparam = text(layer.get("top"), "top"), check_object(layer.get(_HPARAM), _HPARAM)
    for unread in hparam:
        if unread not in _READ and unread not in _OF_NO_TABLE:
            _log.warning("%s.%s.%s: not read", path, _HPARAM, shortened(unread))
    bottom = text(layer.get("bottom", _OLD_INPUT if _OLD_INPUT in model.inputs else None), "bottom")
    if bottom not in model.inputs:
        raise FormatError(
            f"must be a sparse input of the data layer: {', '.join(model.inputs) or 'there is none'}", field="bottom"
        )
    optimizer = _optimizer(layer.get("optimizer", model.optimizer), "optimizer")
    shared: dict[str, Any] = {
        "embedding_dim": whole(
            hparam.get("embedding_vec_size"), f"{_HPARAM}.embedding_vec_size", minimum=1, maximum=MAX_EMBEDDING_DIM
        ),
        "dtype": "fp32",
        "pooling": word(str(hparam.get("combiner", "sum")), f"{_HPARAM}.combiner", _POOLINGS),
        "optimizer": optimizer,
        "access": {"kind": "uniform"},
    }
    features = [{"name": f"{name}_{slot}", "pooling_factor": one} for slot, one in enumerate(model.inputs[bottom])]
    sizes_field, sizes = next(
        (found for found in (_listed(hparam, _HPARAM), _listed(layer, "")) if found[1]),
        ("bottom", model.slot_rows.get(bottom, [])),
    )
    together = _rows_together(layer, hparam, model, optimizer)
    if sizes:
        _check_number(sizes, sizes_field, len(features))
        if together is not None and together[1] < sum(sizes):
            _log.warning("%s.%s.%s: has room for %d of the slots' %d rows", path, _HPARAM, *together, sum(sizes))
        return [
            {"name": of_table[0]["name"], "num_embeddings": rows, "features": of_table, **shared}
            for rows, of_table in _with_rows(sizes_field, sizes, features)
        ]
    if together is None:
        accepted = ", ".join((*_SLOT_ROWS, *_ALL_ROWS, _ROOM_ROWS, _ROOM_MIB))
        raise FormatError(f"must say the rows of its tables: one of {accepted}", field=_HPARAM)
    field, rows = together
    if len(features) > 1 or field in (_ROOM_ROWS, _ROOM_MIB):
        shares = f"one table of {rows} rows that {len(features)} slots share"
        _log.warning("%s.%s.%s: taken for %s", path, _HPARAM, field, shares)
    return [{"name": name, "num_embeddings": rows, "features": features, **shared}]


def _with_rows(
    field: str, slot_rows: list[int], features: list[dict[str, Any]]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows and features of each table; a slot without rows belongs to the table of the next slot that has some."""
    waiting: list[dict[str, Any]] = []
    for rows, feature in zip(slot_rows, features, strict=True):
        waiting.append(feature)
        if rows:
            yield rows, waiting
            waiting = []
    if waiting:
        slot = len(features) - len(waiting)
        raise FormatError(
            f"has size 0 for slot {slot}, and no later slot of the embedding has rows to share", field=field
        )


def _rows_together(
    layer: Mapping[str, object], hparam: Mapping[str, object], model: _Model, optimizer: str
) -> tuple[str, int] | None:
    """Rows of all slots together, or the rows that processors have room for, and the field that says them."""
    for field in _ALL_ROWS:
        if hparam.get(field):
            return field, whole(hparam[field], f"{_HPARAM}.{field}", minimum=1, maximum=MAX_ROWS)
    for field in (_ROOM_ROWS, _ROOM_MIB):
        if not hparam.get(field):
            continue
        each = whole(hparam[field], f"{_HPARAM}.{field}", minimum=1, maximum=MAX_ROWS)
        if field == _ROOM_MIB:
            update = check_object(layer.get("optimizer", model.optimizer) or {}, "optimizer").get("update_type")
            values = _VALUES[optimizer] + (optimizer == "adam" and update == "LazyGlobal")
            dim = whole(hparam.get("embedding_vec_size"), f"{_HPARAM}.embedding_vec_size", minimum=1)
            each = each * 2**20 // (4 * values * dim)
        rows = each * model.num_processors
        if not 1 <= rows <= MAX_ROWS:
            raise FormatError(f"must make 1 to {MAX_ROWS} rows, got {shown(rows)}", field=f"{_HPARAM}.{field}")
        return field, rows
    return None
