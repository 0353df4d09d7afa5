"""Checkpoints of training jobs: free of the plan, written while training goes on."""

from autoshard.runtime.checkpoints.checkpoint import Checkpoint
from autoshard.runtime.checkpoints.checkpoints import Checkpoints
from autoshard.runtime.checkpoints.manifest import Manifest
from autoshard.runtime.checkpoints.random_state import RandomState

__all__ = ["Checkpoint", "Checkpoints", "Manifest", "RandomState"]
