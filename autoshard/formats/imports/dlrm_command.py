"""DLRM's command lines: the tables and dense layers that options of `dlrm_s_pytorch.py` describe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from autoshard.core import TableSet
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import word
from autoshard.formats.documents.tables_json import tables_from_json
from autoshard.formats.files import read_bytes
from autoshard.formats.imports.table_lists import DEFAULT_BATCH_SIZE

#: Option without which a command line describes no tables, and how one is recognised.
TABLE_SIZES: Final = "--arch-embedding-size"
_DIM, _BATCH, _LOOKUPS = "--arch-sparse-feature-size", "--mini-batch-size", "--num-indices-per-lookup"
_FIXED, _DATA, _OPTIMIZER = "--num-indices-per-lookup-fixed", "--data-generation", "--optimizer"
_BOTTOM, _TOP, _INTERACTION = "--arch-mlp-bot", "--arch-mlp-top", "--arch-interaction-op"
#: Options whose tables are no plain tables, and what they make of them.
_REFUSED: Final = {"--qr-flag": "quotient-remainder tables", "--md-flag": "tables of mixed dimensions"}
_OPTIMIZERS: Final = {"sgd": "sgd", "rwsadagrad": "rowwise_adagrad", "adagrad": "adagrad"}
_INTERACTIONS: Final = {"dot": "dot", "cat": "concat"}
#: What the program takes for options that are left out.
_DEFAULTS: Final = {_DIM: "2", _LOOKUPS: "10", _DATA: "random", _OPTIMIZER: "sgd", _INTERACTION: "dot"}
_VALUED: Final = (TABLE_SIZES, _BATCH, _BOTTOM, _TOP, *_DEFAULTS)
_FLAGS: Final = (_FIXED, *_REFUSED)


def is_dlrm_command(source: str) -> bool:
    """Whether a text is a command line that names DLRM's table sizes."""
    return TABLE_SIZES in source


def read_dlrm_command(source: str | Path, *, batch_size: int | None = None) -> TableSet:
    """Tables of a command line of DLRM (facebookresearch/dlrm, `dlrm_s_pytorch.py`), or of a script that holds one.

    A feature of a data set has one id per sample, as Criteo's have. Generated features have `--num-indices-per-lookup`
    of them, or, without `--num-indices-per-lookup-fixed`, a number drawn evenly up to that. Rows are taken to be looked
    up alike.

    Args:
        source: The command line, or a file with it.
        batch_size: Global batch; None for `--mini-batch-size`, or 65,536 where that is left out too.

    Raises:
        FormatError: If the option is missing that gives the tables' sizes, or a value is not accepted.
    """
    given = _options(_words(str(source)))
    if TABLE_SIZES not in given:
        raise FormatError("is missing: it gives the rows of each table", field=TABLE_SIZES)
    for name, meaning in _REFUSED.items():
        if name in given:
            raise FormatError(f"makes {meaning}, which cannot be imported", field=name)
    chosen = {**_DEFAULTS, **given}
    batch = batch_size or _whole(given.get(_BATCH, str(DEFAULT_BATCH_SIZE)), _BATCH)
    tables = [_table(number, rows, chosen) for number, rows in enumerate(_sizes(given[TABLE_SIZES], TABLE_SIZES))]
    document = {"schema": "autoshard.tables/1", "batch_size": batch, "tables": tables}
    return tables_from_json(document | _dense(chosen))


def _words(source: str) -> list[str]:
    """Words of the command line, or of the file that holds it."""
    text = source
    if not is_dlrm_command(source):
        try:
            text = read_bytes(source).decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError("is not UTF-8 text") from None
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise FormatError(f"is no command line: {str(error).lower()}") from None


def _options(words: list[str]) -> Mapping[str, str]:
    """Options that describe the model, by name, with their values; flags have an empty one."""
    found: dict[str, str] = {}
    for position, item in enumerate(words):
        name, equals, value = item.partition("=")
        if name in _FLAGS:
            found[name] = ""
        elif name in _VALUED:
            if not equals and position + 1 == len(words):
                raise FormatError("must have a value", field=name)
            if found.setdefault(name, said := value if equals else words[position + 1]) != said:
                raise FormatError(f"is there twice: {shown(found[name])} and {shown(said)}", field=name)
    return found


def _whole(text: str, field: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise FormatError(f"must be a whole number, got {shown(text)}", field=field)
    return int(text)


def _sizes(text: str, field: str) -> list[int]:
    """Numbers with `-` between them."""
    return [_whole(part, field) for part in text.split("-")]


def _table(number: int, rows: int, chosen: Mapping[str, str]) -> dict[str, object]:
    return {
        "name": f"table_{number}",
        "num_embeddings": rows,
        "embedding_dim": _whole(chosen[_DIM], _DIM),
        "dtype": "fp32",
        "pooling": "sum",
        "optimizer": word(chosen[_OPTIMIZER], _OPTIMIZER, _OPTIMIZERS),
        "features": [{"name": f"feature_{number}", "pooling_factor": _lookups(rows, chosen)}],
        "access": {"kind": "uniform"},
    }


def _lookups(rows: int, chosen: Mapping[str, str]) -> float:
    """Mean ids per sample of a feature.

    DLRM draws round(max(1, r m)) ids for an even r in [0, 1) and m the smaller one of rows and option: 1 to 1.5 gives
    1, and m has half the share of the others, so that the mean is m / 2 + 1 / (2 m).
    """
    if chosen[_DATA] == "dataset":
        return 1.0
    most = min(rows, _whole(chosen[_LOOKUPS], _LOOKUPS))
    return float(most) if _FIXED in chosen or most < 1 else most / 2 + 1 / (2 * most)


def _dense(chosen: Mapping[str, str]) -> dict[str, object]:
    """The dense layers, if the command line describes both perceptrons."""
    if _BOTTOM not in chosen or _TOP not in chosen:
        return {}
    inputs, *bottom = _sizes(chosen[_BOTTOM], _BOTTOM)
    layers = {"num_dense_features": inputs, "bottom_mlp": bottom, "top_mlp": _sizes(chosen[_TOP], _TOP)}
    return {"dense": {**layers, "interaction": word(chosen[_INTERACTION], _INTERACTION, _INTERACTIONS)}}
