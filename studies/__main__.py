"""The command `python -m studies NAME`: one study each, imported when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Final

from autoshard.cli import run_commands

#: Studies by name; each is a function as a command of `autoshard` is.
STUDIES: Final = {
    "fig4": "studies.kernels.fig4:main",
    "repeatability": "studies.kernels.repeatability:main",
    "eviction": "studies.kernels.eviction:main",
    "gpu": "studies.gpu.study:main",
    "kill-test": "studies.kernels.kill_test:main",
    "cost-models": "studies.cost_models.compare:main",
    "calibrate": "studies.cost_models.calibration:main",
    "hours": "studies.cost_models.hours:main",
    "engines": "studies.engines.side_by_side:main",
    "host-time": "studies.engines.host_time:main",
    "input-work": "studies.engines.input_work:main",
    "processor-work": "studies.engines.processor_work:main",
    "host-waits": "studies.engines.host_waits:main",
    "policy": "studies.planners.policy_runs:main",
    "policy-training": "studies.planners.policy_training:main",
    "reinforced": "studies.planners.reinforced.study:main",
    "limits": "studies.planners.limit_runs:main",
    "never-beaten": "studies.planners.never_beaten:main",
    "granularity": "studies.planners.granularity:main",
    "fooled": "studies.planners.fooled:main",
    "pooled-rows": "studies.planners.pooled_rows:main",
    "side-by-side": "studies.planners.side_by_side:main",
    "steps": "studies.planners.step_runs:main",
    "flexshard": "studies.papers.flexshard.study:main",
    "oper": "studies.papers.oper.study:main",
    "neo": "studies.papers.neo:main",
    "two-d": "studies.papers.two_d:main",
    "papers-executed": "studies.runtime.papers_executed:main",
    "job-kills": "studies.runtime.job_kills:main",
    "payloads": "studies.runtime.payloads:main",
    "moments": "studies.runtime.moments.study:main",
    "checkpoint-pairs": "studies.runtime.checkpoint_pairs:main",
    "adopt": "studies.runtime.adoption:main",
    "checkpoint-cost": "studies.runtime.checkpoint_cost:main",
    "virtual-time": "studies.runtime.virtual_time:main",
    "slow-links": "studies.runtime.slow_links.study:main",
    "following": "studies.runtime.following:main",
    "loss-curves": "studies.runtime.loss_curves:main",
    "virtual-contests": "studies.runtime.virtual_contests:main",
    "access-counts": "studies.runtime.access_counts:main",
    "service": "studies.service.attack:main",
    "service-load": "studies.service.load:main",
    "service-kills": "studies.service.kills:main",
    "service-disk": "studies.service.disk:main",
}
#: Words of the command line before the name of a study.
PROGRAM: Final = "python -m studies"


def study_points() -> dict[str, EntryPoint]:
    """All studies by name."""
    return {name: EntryPoint(name=name, value=value, group=PROGRAM) for name, value in STUDIES.items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs a study; returns the exit code, as `autoshard.cli.main` does."""
    about = "Computes figures of papers, compares planners and models, and makes the figures of docs."
    return run_commands(study_points(), arguments, program=PROGRAM, about=about)


if __name__ == "__main__":
    sys.exit(main())
