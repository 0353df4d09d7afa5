"""What one process finds wrong with its batch, as the error of all processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoshard.core.errors import InputError
from autoshard.runtime.engine.staging import staged


def fault_of_all(
    fault: InputError | None,
    bad: Sequence[int],
    group: dist.ProcessGroup,
    peers: dist.ProcessGroup | None,
    device: torch.device,
) -> InputError | None:
    """The error of the first process that has one, on all processes of all replica groups; None if none has.

    All of them have to call it. Where nothing is wrong, one replica group sends nothing, and several reduce a number.
    The error is not raised here, where its traceback would keep the process groups.

    Args:
        fault: This process's error.
        bad: Processes of its replica group that have one.
        group: The replica group.
        peers: The processes of this one's place in all replica groups; None where there is one group.
        device: Where to send from.

    Returns:
        The error, with the process that found it.
    """
    num_groups = 1 if peers is None else peers.size()
    first = num_groups if not bad else 0 if peers is None else peers.rank()
    if peers is not None:
        first_1 = staged([first], device)
        dist.all_reduce(first_1, op=dist.ReduceOp.MIN, group=peers)
        first = int(first_1)
    if first == num_groups:
        return None
    found_by = f" (in the batch of process {dist.get_rank()})"
    told = [None if fault is None else (fault.message + found_by, fault.field)]
    if bad:
        dist.broadcast_object_list(told, group_src=bad[0], group=group, device=device)
    if peers is not None:
        dist.broadcast_object_list(told, group_src=first, group=peers, device=device)
    assert told[0] is not None, "a process that has one has told it"
    message, field = told[0]
    return InputError(message, field=field)
