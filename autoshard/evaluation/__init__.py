"""Prices plans."""

from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel, DeviceMemory
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
    "DeviceArithmetic",
    "DeviceMemory",
    "StepPrice",
    "Traffic",
    "UpperEndComm",
    "UpperEndKernels",
    "at_upper_end",
    "evaluate",
    "plan_traffic",
    "price_step",
]
