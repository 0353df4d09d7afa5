"""Learned costs of embedding kernels: features, networks, training and the registry of models."""

from costmodel.kernel.card import CostModelCard, Coverage, HeldOutMetrics
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
    "Coverage",
    "FeatureScaling",
    "HeldOutMetrics",
    "LearnedCostModel",
    "Registry",
    "StoredModel",
    "Version",
    "default_registry",
    "shard_features",
    "weight_shapes",
]
