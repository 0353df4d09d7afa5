"""Prices plans."""

from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel, DeviceMemory
from autoshard.evaluation.batch_memory import activation_bytes, training_bytes
from autoshard.evaluation.cached_rows import CacheTraffic, behind_caches, cache_traffic
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.evaluation.dense_time import DEVICE_ARITHMETIC, AnalyticDenseModel, DeviceArithmetic
from autoshard.evaluation.evaluate import evaluate, price_step
from autoshard.evaluation.step_price import StepPrice
from autoshard.evaluation.traffic import Traffic, plan_traffic
from autoshard.evaluation.upper_end import UpperEndComm, UpperEndKernels, at_upper_end

__all__ = [
    "DEVICE_ARITHMETIC",
    "DEVICE_MEMORY",
    "AlphaBetaComm",
    "AnalyticCostModel",
    "AnalyticDenseModel",
    "CacheTraffic",
    "DeviceArithmetic",
    "DeviceMemory",
    "StepPrice",
    "Traffic",
    "UpperEndComm",
    "UpperEndKernels",
    "activation_bytes",
    "at_upper_end",
    "behind_caches",
    "cache_traffic",
    "evaluate",
    "plan_traffic",
    "price_step",
    "training_bytes",
]
