"""Prices plans."""

from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel, DeviceMemory
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.evaluation.evaluate import evaluate
from autoshard.evaluation.traffic import Traffic, plan_traffic

__all__ = [
    "DEVICE_MEMORY",
    "AlphaBetaComm",
    "AnalyticCostModel",
    "DeviceMemory",
    "Traffic",
    "evaluate",
    "plan_traffic",
]
