"""Learned costs of embedding kernels: features, networks, training and the registry of models."""

from costmodel.kernel.card import CostModelCard, HeldOutMetrics, TrainedCoverage
from costmodel.kernel.features import FEATURE_NAMES, NUM_FEATURES, FeatureScaling, shard_features
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from costmodel.kernel.weights import CODE_WIDTH, weight_shapes
from costmodel.registry.versions import Registry, StoredModel, Version, default_registry

__all__ = [
    "CODE_WIDTH",
    "FEATURE_NAMES",
    "FULL_CODE_WIDTH",
    "NUM_FEATURES",
    "CostModelCard",
    "FeatureScaling",
    "HeldOutMetrics",
    "LearnedCostModel",
    "Registry",
    "StoredModel",
    "TrainedCoverage",
    "Version",
    "default_registry",
    "shard_features",
    "weight_shapes",
]
