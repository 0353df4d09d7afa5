"""A sharding policy for planners that need one, and nothing else that a planner could lean on."""

from itertools import product

import numpy as np
import pytest
import torch

from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, Update
from costmodel import FEATURE_NAMES, CostModelCard, Coverage, FeatureScaling, HeldOutMetrics, Registry, weight_shapes
from costmodel.card import Interval
from costmodel.predictor import FULL_CODE_WIDTH
from policies.network import PlacementNetwork
from policies.trained import PolicyCostModel, TrainedPolicy

#: Widths of the untrained encoder.
HIDDEN = (16,)
#: Kinds of kernels that it says it has seen: all there are.
KINDS = tuple(map("/".join, product(Update, MemoryLevel, DType, [*Optimizer, "none"], [*Pooling, "rows"])))


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """A policy as it is before training: what it promises does not depend on how well it plans."""
    folder = Registry(tmp_path_factory.mktemp("registry"))
    for device in ("cpu", "a100"):
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        card = CostModelCard(
            device=device,
            coverage=Coverage(
                kinds=KINDS,
                num_tables=(1, 100),
                ranges=dict.fromkeys(("num_bags", "embedding_dim", "num_embeddings", "pooling_factor"), (0.0, 1e12)),
            ),
            encoder_hidden=HIDDEN,
            scaling=FeatureScaling.fit(rng.normal(size=(100, len(FEATURE_NAMES)))),
            scale_ms=1.0,
            metrics=HeldOutMetrics(num_samples=1, mae_ms=1, mse_ms2=1, relative_error=1, kendall_tau=0),
            interval=Interval(low=-1.0, high=1.0),
            training={},
        )
        weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in weight_shapes(HIDDEN).items()}
        cost = PolicyCostModel(weights=weights, card=card)
        TrainedPolicy(network=PlacementNetwork(FULL_CODE_WIDTH), cost=cost, training={}).publish(folder)
    return folder.root
