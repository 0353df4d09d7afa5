"""FBGEMM's `TBEDataConfig`: what its parameter reporter and its benchmarks write about one TBE, as tables.

Shape suffixes: T features of one TBE, H heavy hitters, I intervals of access ranks, K knots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import MAX_BATCH_SIZE, MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_TABLES
from autoshard.core.access import FloatArray, mixture
from autoshard.core.errors import FormatError, InvalidTableError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import at_path, from_source, items
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.documents.kinds import (
    ANYTHING,
    FLAG,
    Field,
    Kind,
    list_of,
    number_in,
    one_of,
    optional,
    record,
    whole_number,
)
from autoshard.formats.documents.tables_json import BATCH_SIZE, DIM, NUM_ROWS, POOLING_FACTOR
from autoshard.formats.files import files_of
from autoshard.formats.imports.dlrm_datasets import Advance

#: Fields by which a file of this format is known.
_PARAMETERS = {"batch_params", "indices_params", "pooling_params"}
_MAX_HEAVY_HITTERS = 10_000
#: What FBGEMM's reporter calls its files; the groups are the operator and the iteration.
_REPORTED = re.compile(r"tbe-(.*)-config-estimation-(\d+)\.json")
#: Probabilities are written from fp32 and may add up to a little more than 1.
_ROUNDING = 1e-5
#: Powers of ranks stay within doubles at these limits; the reporter keeps to q < 1e5 and s < 2.
_ZIPF_Q_LIMITS = (1e-6, 1e9)
_MAX_ZIPF_S = 20.0
#: FBGEMM's reporter steps through s in doubles and meets 1 only nearly, where differences of powers cancel.
_NEARLY_ONE = 1e-8
#: 99th percentile of the standard normal distribution.
_NORMAL_P99 = 2.3263478740408408


def read_tbe_data_config(
    path: str | Path, *, batch_size: int | None = None, seed: int = 0, advance: Advance = lambda _: None
) -> TableSet:
    """Tables from a `TBEDataConfig` JSON, or from all such files of a folder.

    Carried over:

    - Tables: one per feature, with the rows and dimension of `Es` and `Ds`, else `E` and `D`. Features that
      `feature_table_map` sends to one table become features of that table. Names start with the file's.
    - Global batch: `B`; times `vbe_num_ranks` where `sigma_B` is there and `Bs` is not, as the generator takes it.
      A feature with another batch in `Bs` keeps its lookups per step: its pooling factor is scaled by `Bs / B`.
    - Pooling factor: `Ls`, else `L`. With `sigma_L` the variance and 99th percentile are those of the
      `length_distribution`; for `uniform`, `L` and `sigma_L` are its bounds, as the generator takes them. Beside `Ls`,
      `sigma_L` is the spread over all features, rounded up, as the reporter writes it; half is taken off for the
      rounding, and the variance that `Ls` explain.
    - Access profile: of `indices_params_list`, else `indices_params`; see `tbe_access`. Features that share a table
      are taken to agree on the order of its rows.
    - `mixed_dim` without `Ds`: dimensions are drawn as the generator draws them, multiples of 4 around `D`.
    - `weighted`: every lookup of its tables has a weight.

    Not carried over: `use_cpu`, `index_dtype`, `offset_dtype`, `max_indices`. What the file does not say: weights are
    fp32, pooling is a sum, the optimizer row-wise AdaGrad.

    A folder's files are read in the order of their names. Of the iterations that FBGEMM's reporter writes of one
    operator (`tbe-<operator>-config-estimation-<iteration>.json`) the last is read, since all describe the same tables.

    Args:
        path: A file, or a folder with `.json` files of this format only.
        batch_size: Global batch; None takes the files', which must agree. Pooling factors stay per sample.
        seed: Of the draw of mixed dimensions.
        advance: Is told of progress.

    Raises:
        InputError: If a file is not in that format; unknown fields count, since they may change the meaning.

    Source:
        FBGEMM `tbe/bench/tbe_data_config*.py`, `tbe/monitoring/bench_params_reporter.py`, `tbe/utils/requests.py`.
    """
    files = _files(Path(path))
    rng = np.random.default_rng(seed)
    tables: list[EmbeddingTable] = []
    agreed = 0
    for file in files:
        document = read_json(file)
        config = from_source(str(file), partial(_read_config, document))
        agreed = agreed or config.batch_size
        if batch_size is None and config.batch_size != agreed:
            raise FormatError(
                f"must be the same in all files unless the option batch_size is given; got {config.batch_size}, "
                f"and {agreed} in {files[0]}",
                field="batch_params.B",
                source=str(file),
            )
        prefix = file.stem.encode(errors="replace").decode()
        tables += from_source(str(file), partial(_tables_of, config, prefix, rng))
        if len(tables) > MAX_TABLES:
            raise FormatError(f"makes more than {MAX_TABLES:,} tables", source=str(file))
        advance(1 / len(files))
    return TableSet(batch_size=batch_size or agreed, tables=tuple(tables))


def is_tbe_data_config(document: object) -> bool:
    """Whether a parsed JSON is meant to be a `TBEDataConfig`."""
    return isinstance(document, dict) and "schema" not in document and document.keys() >= _PARAMETERS


@lru_cache(maxsize=4096)
def tbe_access(num_rows: int, heavy_hitters: tuple[float, ...], zipf_q: float, zipf_s: float) -> AccessProfile:
    """Profile of the ids that FBGEMM's generator draws from `IndicesParams`.

    Of H heavy hitters row i < H has probability `heavy_hitters[i]`. The rest of the probability goes to the other rows,
    H <= i < num_rows, in proportion to (i + q) ** -s. The profile orders rows by probability, so a heavy hitter
    may come after some of the others.

    Args:
        num_rows: Rows of the table.
        heavy_hitters: Probabilities in [0, 1] that add up to at most 1. Those beyond `num_rows` are left out, the
            smallest first, and the others fill up to 1 if they are all the rows.
        zipf_q: q, in [1e-6, 1e9].
        zipf_s: s, in [0, 20].

    Raises:
        InvalidTableError: If a number is out of range.

    Source:
        FBGEMM `src/tbe/eeg/indices_generator.cpp` (choice of a heavy hitter) and `eeg_utils.h` (ZipfianDistribution,
        whose rejection sampler is exact).
    """
    hot_H = np.sort(np.array(heavy_hitters, dtype=np.float64))[::-1][:num_rows]
    if not (np.isfinite(hot_H).all() and (hot_H >= 0).all() and hot_H.sum() <= 1 + _ROUNDING):
        raise InvalidTableError(
            f"must be probabilities that add up to at most 1, got {math.fsum(heavy_hitters):g}", field="heavy_hitters"
        )
    low, high = _ZIPF_Q_LIMITS
    if not (low <= zipf_q <= high and 0 <= zipf_s <= _MAX_ZIPF_S):
        raise InvalidTableError(
            f"q must be in [{low:g}, {high:g}] and s in [0, {_MAX_ZIPF_S:g}], got {zipf_q:g} and {zipf_s:g}",
            field="zipf",
        )
    s = 1.0 if abs(zipf_s - 1) < _NEARLY_ONE else zipf_s
    num_tail = num_rows - len(hot_H)
    if num_tail == 0:
        return _sorted_profile(np.ones(len(hot_H)), hot_H)
    if len(hot_H) == 0 and zipf_q < 1:  # row 0 apart: a profile's shift, q - 1, may not be negative
        if num_tail == 1:
            return AccessProfile.uniform(1)
        tail = AccessProfile.zipf(num_tail - 1, s, zipf_q)
        first = (1 + 1 / zipf_q) ** s * float(tail.coverage(1))
        hot_H, rest = np.array([first / (1 + first)]), 1 / (1 + first)
    else:
        tail = AccessProfile.zipf(num_tail, s, zipf_q + len(hot_H) - 1)
        rest = max(0.0, 1.0 - float(hot_H.sum()))
    rows_I = np.concatenate([np.ones(len(hot_H)), np.diff(tail.ranks_K)])
    return _sorted_profile(rows_I, np.concatenate([hot_H, rest * np.diff(tail.cumulative_K)]))


def _sorted_profile(rows_I: FloatArray, masses_I: FloatArray) -> AccessProfile:
    if masses_I.sum() <= 0:
        return AccessProfile.uniform(round(float(rows_I.sum())))
    order_I = np.argsort(-masses_I / rows_I, kind="stable")
    cumulative_K = np.concatenate([[0.0], np.cumsum(masses_I[order_I])])
    return AccessProfile(np.concatenate([[0.0], np.cumsum(rows_I[order_I])]), cumulative_K / cumulative_K[-1])


_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Lengths of one feature's bags."""

    mean: float
    variance: float
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indices:
    heavy_hitters: tuple[float, ...]
    zipf_q: float
    zipf_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """A checked file; lists hold one value per feature, `dims_T` is None where dimensions have to be drawn."""

    batch_size: int
    batches_T: _Sizes
    rows_T: _Sizes
    dim: int
    dims_T: _Sizes | None
    is_weighted: bool
    lengths_T: tuple[_Lengths, ...]
    indices_T: tuple[_Indices, ...]
    tables_T: _Sizes


def _files(path: Path) -> list[Path]:
    files = files_of(path, lambda file: file.suffix == ".json" and not file.name.startswith("."), ".json")
    last: dict[str, int] = {}
    for file in files:
        if match := _REPORTED.fullmatch(file.name):
            last[match[1]] = max(int(match[2]), last.get(match[1], 0))
    return [file for file in files if not (match := _REPORTED.fullmatch(file.name)) or int(match[2]) == last[match[1]]]


def _indices(heavy_hitters: tuple[float, ...], zipf_q: float, zipf_s: float, **_dtypes: object) -> _Indices:
    if math.fsum(heavy_hitters) > 1 + _ROUNDING:
        raise FormatError(
            f"must be probabilities that add up to at most 1, they add up to {math.fsum(heavy_hitters):g}",
            field="heavy_hitters",
        )
    return _Indices(heavy_hitters=heavy_hitters, zipf_q=zipf_q, zipf_s=zipf_s)


def _read_spec(value: object, path: str) -> tuple[int, int]:
    rows, dim = items(value, path, minimum=2, maximum=2)
    return NUM_ROWS.read(rows, f"{path}[0]"), DIM.read(dim, f"{path}[1]")


_SPEC: Final = Kind({}, _read_spec)
_DISTRIBUTION: Final = one_of(("normal", "uniform"))
_INDICES: Final = record(
    _indices,
    Field("heavy_hitters", list_of(number_in(0, 1 + _ROUNDING), 0, _MAX_HEAVY_HITTERS)),
    Field("zipf_q", number_in(*_ZIPF_Q_LIMITS)),
    Field("zipf_s", number_in(0, _MAX_ZIPF_S)),
    *(optional(name, ANYTHING) for name in ("index_dtype", "offset_dtype")),
)


def _read_config(document: object) -> _Config:
    given = _given(document)
    num_features = given.get("T") if isinstance(given, dict) else None
    # If it is no number of features, the file is refused for that, whatever its lists hold.
    return _config_kind(num_features if type(num_features) is int and num_features > 0 else 1).read(given, "")


def _config_kind(n: int) -> Kind[_Config]:
    """A file of `n` features."""
    lengths: Kind[dict[str, Any]] = record(
        dict,
        Field("L", POOLING_FACTOR),
        optional("sigma_L", POOLING_FACTOR),
        optional("length_distribution", _DISTRIBUTION),
        optional("Ls", list_of(POOLING_FACTOR, n, n)),
    )
    batches = record(
        partial(_batches, n),
        Field("B", BATCH_SIZE),
        optional("sigma_B", number_in()),
        optional("vbe_distribution", _DISTRIBUTION),
        optional("vbe_num_ranks", BATCH_SIZE),
        optional("Bs", list_of(BATCH_SIZE, n, n)),
    )
    return record(
        _config,
        Field("T", whole_number(1, MAX_TABLES)),
        *(Field(name, ANYTHING) for name in ("E", "D")),
        *(Field(name, FLAG) for name in ("mixed_dim", "weighted")),
        Field("batch_params", batches),
        Field("indices_params", _INDICES),
        Field("pooling_params", lengths),
        *(optional(name, ANYTHING) for name in ("use_cpu", "Es", "Ds", "max_indices", "embedding_specs")),
        optional("feature_table_map", list_of(whole_number(0, n - 1), n, n)),
        optional("indices_params_list", list_of(_INDICES, n, n)),
    )


def _config(
    *,
    T: int,
    batch_params: tuple[int, _Sizes],
    indices_params: _Indices,
    pooling_params: dict[str, Any],
    mixed_dim: bool,
    weighted: bool,
    feature_table_map: _Sizes = (),
    indices_params_list: tuple[_Indices, ...] = (),
    **sizes: object,
) -> _Config:
    batch_size, batches_T = batch_params
    dims_T = _sizes(sizes, "D", T, DIM)
    config = _Config(
        batch_size=batch_size,
        batches_T=batches_T,
        rows_T=_sizes(sizes, "E", T, NUM_ROWS),
        dim=dims_T[0],
        dims_T=None if mixed_dim and "Ds" not in sizes and not isinstance(sizes["D"], list) else dims_T,
        is_weighted=weighted,
        lengths_T=at_path("pooling_params", lambda: _lengths(batches_T, **pooling_params)),
        indices_T=indices_params_list or (indices_params,) * T,
        tables_T=feature_table_map or tuple(range(T)),
    )
    missing = {*range(max(config.tables_T) + 1)} - {*config.tables_T}
    if missing:
        raise FormatError(f"must give every table a feature, table {min(missing)} has none", field="feature_table_map")
    _check_shared(config, sizes.get("embedding_specs"))
    return config


def _given(value: object) -> object:
    """The value without fields that are null, which FBGEMM writes for what is not set."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def _sizes(given: Mapping[str, object], name: str, num_features: int, size: Kind[int]) -> _Sizes:
    """One size per feature. The reporter writes means as doubles, such as 1001.0; older files have lists for them."""
    listed = name if isinstance(given[name], list) else f"{name}s"
    if listed in given:
        return list_of(size, num_features, num_features).read(given[listed], listed)
    value = given[name]
    rounded = int(value) if isinstance(value, float) and value.is_integer() else value
    return (size.read(rounded, name),) * num_features


def _batches(
    num_features: int, *, B: int, Bs: _Sizes = (), sigma_B: float | None = None, vbe_num_ranks: int = 1, **_: object
) -> tuple[int, _Sizes]:
    """The global batch, and the batch of each feature."""
    if Bs:
        return B, Bs
    batch_size = B if sigma_B is None else B * vbe_num_ranks
    if batch_size > MAX_BATCH_SIZE:
        raise FormatError(f"must be at most {MAX_BATCH_SIZE} over all ranks, got {batch_size}", field="B")
    return batch_size, (batch_size,) * num_features


def _lengths(
    batches_T: _Sizes,
    *,
    L: float,
    sigma_L: float | None = None,
    length_distribution: str = "normal",
    Ls: tuple[float, ...] = (),
) -> tuple[_Lengths, ...]:
    sigma, is_uniform = sigma_L or 0.0, length_distribution == "uniform"
    if Ls:
        middle = float(np.average(Ls, weights=batches_T))
        explained = float(np.average((np.array(Ls) - middle) ** 2, weights=batches_T))
        # The reporter rounds sigma_L up: half is the mean of what that adds.
        variance = 0.0 if is_uniform else max(0.0, max(0.0, sigma - 0.5) ** 2 - explained)
        return tuple(_normal_lengths(mean, variance) for mean in Ls)
    if is_uniform and sigma_L is not None:
        if sigma < L:
            raise FormatError(
                f"is the upper bound of uniform lengths and must be at least L, {L:g}; got {sigma:g}", field="sigma_L"
            )
        span = sigma - L + 1
        p99 = L + math.ceil(0.99 * span) - 1
        return (_Lengths(mean=(L + sigma) / 2, variance=(span**2 - 1) / 12, p99=p99),) * len(batches_T)
    return (_normal_lengths(L, sigma**2),) * len(batches_T)


def _normal_lengths(mean: float, variance: float) -> _Lengths:
    if variance == 0:  # a fractional mean does not say how long the longest are
        return _Lengths(mean=mean, variance=0.0, p99=mean if mean.is_integer() else None)
    p99 = min(mean + _NORMAL_P99 * math.sqrt(variance), MAX_POOLING_FACTOR)
    return _Lengths(mean=mean, variance=variance, p99=p99)


def _check_shared(config: _Config, embedding_specs: object) -> None:
    """Features of one table must agree on its sizes, and with `embedding_specs`."""
    specs: dict[int, tuple[int, int]] = {}
    if embedding_specs is not None:
        num_tables = max(config.tables_T) + 1
        specs.update(enumerate(list_of(_SPEC, num_tables, num_tables).read(embedding_specs, "embedding_specs")))
    for feature, table in enumerate(config.tables_T):
        dim = config.dims_T[feature] if config.dims_T is not None else config.dim
        rows, other = specs.setdefault(table, (config.rows_T[feature], dim))
        if (config.rows_T[feature], dim) != (rows, other):
            raise FormatError(
                f"table {table} has {rows} rows of dimension {other}, its feature {feature} has "
                f"{config.rows_T[feature]} of {dim}",
                field="feature_table_map" if embedding_specs is None else "embedding_specs",
            )


def _tables_of(config: _Config, prefix: str, rng: np.random.Generator) -> list[EmbeddingTable]:
    num_tables = max(config.tables_T) + 1
    widths = len(str(num_tables - 1)), len(str(len(config.tables_T) - 1))
    features_of: list[list[int]] = [[] for _ in range(num_tables)]
    for feature, table in enumerate(config.tables_T):
        features_of[table].append(feature)
    made = []
    for table, members in enumerate(features_of):
        features = tuple(_feature(config, feature, f"{prefix}.f{feature:0{widths[1]}d}") for feature in members)
        num_rows = config.rows_T[members[0]]
        access = [
            tbe_access(num_rows, indices.heavy_hitters, indices.zipf_q, indices.zipf_s)
            for indices in (config.indices_T[feature] for feature in members)
        ]
        weighted = [(one, feature.pooling_factor) for one, feature in zip(access, features, strict=True)]
        used = any(weight > 0 for _, weight in weighted)
        made.append(
            EmbeddingTable(
                name=f"{prefix}.t{table:0{widths[0]}d}",
                num_embeddings=num_rows,
                embedding_dim=_drawn_dim(config.dim, rng) if config.dims_T is None else config.dims_T[members[0]],
                features=features,
                access=mixture(weighted) if used and len(access) > 1 else access[0],
                weighted=config.is_weighted,
            )
        )
    return made


def _feature(config: _Config, index: int, name: str) -> Feature:
    lengths, batch = config.lengths_T[index], config.batches_T[index]
    factor = lengths.mean * batch / config.batch_size
    if factor > MAX_POOLING_FACTOR:
        raise FormatError(
            f"makes {shown(factor)} lookups per sample of the batch {config.batch_size}, at most "
            f"{MAX_POOLING_FACTOR:g} are accepted",
            field=f"batch_params.Bs[{index}]",
        )
    return Feature(
        name=name,
        pooling_factor=factor,
        pooling_variance=lengths.variance,
        pooling_p99=lengths.p99 if batch == config.batch_size else None,
    )


def _drawn_dim(dim: int, rng: np.random.Generator) -> int:
    """A dimension as FBGEMM's `generate_embedding_dims` draws it: half to 1.5 times the mean, a multiple of 4."""
    drawn = int(rng.integers(dim // 2, max(dim // 2 + 1, 3 * dim // 2)))
    return min(max(4, -(-drawn // 4) * 4), MAX_EMBEDDING_DIM)
