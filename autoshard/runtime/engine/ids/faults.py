"""What one process finds wrong with its batch, as the error of all processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoshard.core.errors import InputError


def first_group(is_bad: torch.Tensor, peers: dist.ProcessGroup) -> torch.Tensor:
    """The first of several replica groups that has a bad batch, or their number; all of them have to call it.

    Args:
        is_bad: Whether this one has one.
        peers: The processes of this one's place in all replica groups.

    Returns:
        A number on the device, of shape (1,).
    """
    first_1 = torch.where(is_bad, peers.rank(), peers.size()).view(1)
    dist.all_reduce(first_1, op=dist.ReduceOp.MIN, group=peers)
    return first_1


def fault_of_all(
    fault: InputError | None,
    bad: Sequence[int],
    first: int | None,
    group: dist.ProcessGroup,
    peers: dist.ProcessGroup | None,
    device: torch.device,
) -> InputError:
    """The error of the first process that has one, on all processes of all replica groups, which have to call it.

    The error is not raised here, where its traceback would keep the process groups.

    Args:
        fault: This process's error.
        bad: Processes of its replica group that have one.
        first: The first replica group that has one; None where there is one group.
        group: The replica group.
        peers: The processes of this one's place in all replica groups; None where there is one group.
        device: Where to send from.

    Returns:
        The error, with the process that found it.
    """
    found_by = f" (in the batch of process {dist.get_rank()})"
    told = [None if fault is None else (fault.message + found_by, fault.field)]
    if bad:
        dist.broadcast_object_list(told, group_src=bad[0], group=group, device=device)
    if peers is not None:
        dist.broadcast_object_list(told, group_src=first, group=peers, device=device)
    assert told[0] is not None, "a process that has one has told it"
    message, field = told[0]
    return InputError(message, field=field)
