"""Executes plans on torch.distributed, with FBGEMM's fused kernels or TorchRec.

The names here start runs in child processes. A trainer that already runs under torchrun uses
`autoshard.runtime.embeddings.ShardedEmbeddings`, an `nn.Module` made from a plan.
"""

from autoshard.core.choices import Device, Engine
from autoshard.runtime.ownership import ownership_of
from autoshard.runtime.processes.launch import RunProgress, run_requests
from autoshard.runtime.results import RankTiming, RunRequest, RunResult, Verification

__all__ = [
    "Device",
    "Engine",
    "RankTiming",
    "RunProgress",
    "RunRequest",
    "RunResult",
    "Verification",
    "ownership_of",
    "run_requests",
]
