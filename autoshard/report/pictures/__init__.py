"""Pictures of plans: where tables are, how skewed their accesses are, what replicas cost, how good predictions were."""

from autoshard.report.pictures.access_curves import MOST_CURVES, access_figure, curved_tables
from autoshard.report.pictures.accuracy import accuracy_figure, held_out_figure, predicted_interval
from autoshard.report.pictures.pareto import MOST_FRONTIERS, pareto_figure
from autoshard.report.pictures.placement_map import placement_figure

__all__ = [
    "MOST_CURVES",
    "MOST_FRONTIERS",
    "access_figure",
    "accuracy_figure",
    "curved_tables",
    "held_out_figure",
    "pareto_figure",
    "placement_figure",
    "predicted_interval",
]
