"""Whole steps on clusters that nobody has at hand: sweeps over machines, ranks, replica groups and batch sizes."""

from autoshard.simulation.points import (
    PointMemory,
    PricedPoint,
    SimulatedPoint,
    SweepPoint,
    UnpricedPoint,
    scaling_factors,
)
from autoshard.simulation.record import SIMULATION, SweepRecord, read_record
from autoshard.simulation.spread import Lengths, StepSpread, sample_steps
from autoshard.simulation.sweep import Simulator, sweep_points

__all__ = [
    "SIMULATION",
    "Lengths",
    "PointMemory",
    "PricedPoint",
    "SimulatedPoint",
    "Simulator",
    "StepSpread",
    "SweepPoint",
    "SweepRecord",
    "UnpricedPoint",
    "read_record",
    "sample_steps",
    "scaling_factors",
    "sweep_points",
]
