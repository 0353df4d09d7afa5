"""Executes plans on torch.distributed, with FBGEMM's fused kernels or TorchRec.

The names here start runs in child processes and need no torch. A trainer that already runs under torchrun uses
`autoshard.runtime.embeddings.ShardedEmbeddings`, an `nn.Module` made from a plan.
"""

from autoshard.runtime.launch import RunProgress, run_plan, run_requests, verify_plan
from autoshard.runtime.ownership import ownership_of
from autoshard.runtime.results import Device, Engine, RankTiming, RunRequest, RunResult, Verification

__all__ = [
    "Device",
    "Engine",
    "RankTiming",
    "RunProgress",
    "RunRequest",
    "RunResult",
    "Verification",
    "ownership_of",
    "run_plan",
    "run_requests",
    "verify_plan",
]
