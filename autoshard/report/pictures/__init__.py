"""Pictures of plans: where tables are, how skewed their accesses are, what replicas cost, how good predictions were."""

from autoshard.report.pictures.access_curves import access_figure
from autoshard.report.pictures.accuracy import accuracy_figure, held_out_figure, predicted_interval
from autoshard.report.pictures.pareto import pareto_figure
from autoshard.report.pictures.placement_map import placement_figure

__all__ = [
    "access_figure",
    "accuracy_figure",
    "held_out_figure",
    "pareto_figure",
    "placement_figure",
    "predicted_interval",
]
