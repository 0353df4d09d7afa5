"""Which dense layers to measure: the published benchmarks' perceptrons, real models' layers, and others around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from autoshard.core import DenseLayers, DType
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape, dense_shapes
from autoshard.core.errors import InvalidOptionError

#: Square perceptrons of Neo's Appendix A are 20 layers of 1K, 2K or 4K at these batches; PARAM's `mlp` set has the
#: first and last of the widths. Narrower and shallower ones are what a CPU measures in the time that it has.
_SQUARE_WIDTHS = (128, 256, 512, 1024, 2048, 4096)
_SQUARE_DEPTHS = (1, 2, 4, 8, 20)
_SQUARE_BATCHES = (128, 256, 512, 1024, 2048, 4096)
#: Local batches: 65,536 samples on 8 to 128 ranks, Neo's Table 3 (512 and 2,048), and what is around them.
_MIN_BATCH, _MAX_BATCH = 64, 8192
_SHARES = {"square": 0.2, "model": 0.25, "pyramid": 0.35, "interaction": 0.2}
#: Every so many shapes one of the last comes again, so that a store tells how well it repeats itself.
_REPEAT_EVERY = 32
_NUM_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseArchitecture:
    """The dense part of a model, with the embeddings that it interacts with."""

    layers: DenseLayers
    feature_dims: tuple[int, ...]
    """Embedding dim of each feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenShape:
    """A shape, and how it was chosen: `square`, `model`, `pyramid`, `interaction` or `repeat`."""

    shape: DenseShape
    source: str


def _criteo(bottom_mlp: tuple[int, ...], top_mlp: tuple[int, ...]) -> DenseArchitecture:
    layers = DenseLayers(num_dense_features=13, bottom_mlp=bottom_mlp, top_mlp=top_mlp)
    return DenseArchitecture(layers=layers, feature_dims=(bottom_mlp[-1],) * 26)


#: Published DLRMs on Criteo's data, 13 dense and 26 categorical features.
KNOWN_ARCHITECTURES = (
    _criteo((512, 256, 128), (1024, 1024, 512, 256, 1)),  # MLPerf Training 0.7 to 2.1, Terabyte
    _criteo((512, 256, 64), (512, 512, 256, 1)),  # DLRM's repository, Terabyte
    _criteo((512, 256, 64, 16), (512, 256, 1)),  # DLRM's repository, Kaggle
)


def choose_dense_shapes(
    *,
    seed: int,
    dtypes: Sequence[DType] = DENSE_DTYPES,
    architectures: Sequence[DenseArchitecture] = KNOWN_ARCHITECTURES,
) -> Iterator[ChosenShape]:
    """Endless shapes to measure; the same seed gives the same ones.

    Args:
        seed: Of the choice.
        dtypes: Number formats, chosen alike.
        architectures: Models whose layers are measured; all batches are a rank's.

    Raises:
        InvalidOptionError: If there is no number format, or no model.
    """
    for name, values in (("dtypes", dtypes), ("architectures", architectures)):
        if not values:
            raise InvalidOptionError("needs at least one", field=name)
    return _chosen_shapes(np.random.default_rng(seed), dtypes, architectures)


def _chosen_shapes(
    rng: np.random.Generator, dtypes: Sequence[DType], architectures: Sequence[DenseArchitecture]
) -> Iterator[ChosenShape]:
    seen: deque[DenseShape] = deque(maxlen=_NUM_REMEMBERED)
    for number in count(1):
        if number % _REPEAT_EVERY == 0:
            yield ChosenShape(shape=seen[int(rng.integers(len(seen)))], source="repeat")
            continue
        source = str(rng.choice(list(_SHARES), p=list(_SHARES.values())))
        dtype = dtypes[int(rng.integers(len(dtypes)))]
        if source == "square":
            shape = _square(rng, dtype)
        elif source == "model":
            shape = _of_model(architectures[int(rng.integers(len(architectures)))], rng, dtype)
        elif source == "pyramid":
            shape = _pyramid(rng, dtype)
        else:
            shape = _interaction(rng, dtype)
        seen.append(shape)
        yield ChosenShape(shape=shape, source=source)


def _square(rng: np.random.Generator, dtype: DType) -> DenseShape:
    width, depth = int(rng.choice(_SQUARE_WIDTHS)), int(rng.choice(_SQUARE_DEPTHS))
    batch_size = int(rng.choice(_SQUARE_BATCHES))
    return DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=batch_size, widths=(width,) * (depth + 1), dtype=dtype)


def _of_model(architecture: DenseArchitecture, rng: np.random.Generator, dtype: DType) -> DenseShape:
    batch_size = 2 ** int(rng.integers(_MIN_BATCH.bit_length() - 1, _MAX_BATCH.bit_length()))
    parts = dense_shapes(architecture.layers, architecture.feature_dims, batch_size, dtype)
    return parts[int(rng.integers(len(parts)))]


def _pyramid(rng: np.random.Generator, dtype: DType) -> DenseShape:
    """One to eight layers whose widths shrink evenly, on the logarithm; a bottom one, or a top one with its logit."""
    depth = int(rng.integers(1, 9))
    widest, narrowest = sorted((_log_uniform(rng, 16, 4096), _log_uniform(rng, 16, 4096)), reverse=True)
    # Multiples of 8, which tensor cores want, as models are built.
    hidden = [8 * max(1, round(float(width) / 8)) for width in np.geomspace(widest, narrowest, depth)]
    if rng.random() < 0.5:
        kind, widths = DenseKind.BOTTOM_MLP, (_log_uniform(rng, 4, 1024), *hidden)
    else:
        kind, widths = DenseKind.TOP_MLP, (_log_uniform(rng, 32, 4096), *hidden, 1)
    return DenseShape(kind=kind, batch_size=_log_uniform(rng, _MIN_BATCH, _MAX_BATCH), widths=widths, dtype=dtype)


def _interaction(rng: np.random.Generator, dtype: DType) -> DenseShape:
    kind = DenseKind.DOT if rng.random() < 2 / 3 else DenseKind.CONCAT
    num_features, embedding_dim = _log_uniform(rng, 1, 256), int(rng.choice((8, 16, 32, 64, 128, 256)))
    batch_size = _log_uniform(rng, _MIN_BATCH, _MAX_BATCH)
    return DenseShape.interaction(batch_size, num_features, embedding_dim, kind=kind, dtype=dtype)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
