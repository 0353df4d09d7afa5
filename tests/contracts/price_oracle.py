"""The slow price of a plan: byte by byte between every pair of ranks, rank by rank, in plain loops.

It shares with the product what one kernel, one collective and one reader's work take, and how many bytes one shard
sends to one reader; everything that adds up or waits is written anew.
"""

import numpy as np

from autoshard.core import Collective, DType, Exchange, GradSync, Pooling
from autoshard.core.costs import set_costs
from autoshard.core.shard import fused_kernel, local_shard
from autoshard.core.step import ENGINE_WORK, PART_FEATURES, StepPart
from autoshard.evaluation.communication import link_bytes
from autoshard.evaluation.reader_work import reader_ms
from autoshard.evaluation.traffic import INT8_BLOCK, id_bytes, pair_bytes, sync_bytes, whole_share

EXCHANGED = {
    StepPart.INPUT: ("lengths", "ids"),
    StepPart.FORWARD_EXCHANGE: ("forward",),
    StepPart.BACKWARD_EXCHANGE: ("backward",),
}
STREAMS = ("lengths", "ids", "forward", "backward")


def slow_parts(plan, costs):
    """Milliseconds of each part at its slowest rank, and of the synchronisation of copied rows, of one group's plan."""
    world = plan.group_size
    weights = {part: weights_of(part, costs, plan.topology) for part in StepPart}
    shards = [placed.as_run(world) for placed in plan.shards]
    sent_RR, scattered = messages(plan, shards)
    forward_R, backward_R = kernels(plan, shards, costs)
    comm, topology = costs.comm, plan.topology
    extra = {
        StepPart.FORWARD_EXCHANGE: comm.collective_ms("reduce_scatter", scattered["forward"] * world, topology),
        StepPart.BACKWARD_EXCHANGE: comm.collective_ms("all_gather", scattered["backward"] * world, topology),
    }
    exchange_ms = {}
    for part, streams in EXCHANGED.items():
        links = link_bytes(sum(sent_RR[stream] for stream in streams), topology)
        exchange_ms[part] = comm.links_ms(links, topology) + extra.get(part, 0.0)
    handled = {
        stream: [
            sent_RR[stream][rank].sum() + sent_RR[stream][:, rank].sum() + scattered.get(stream, 0.0) * (world + 1)
            for rank in range(world)
        ]
        for stream in STREAMS
    }
    read_ms = dict(zip(EXCHANGED, reading(plan, shards), strict=True))
    parts = {}
    for part in (part for part in StepPart if part is not StepPart.DENSE):
        of_ranks = []
        for rank in range(world):
            amounts = {
                "model_ms": exchange_ms[part][rank] if part in exchange_ms else 0.0,
                "reading_ms": read_ms.get(part, 0.0),
                "steps": 1.0,
                "million_ids": handled["ids"][rank] / 4e6,
                "million_lengths": handled["lengths"][rank] / 4e6,
                "row_exchanges": float(any(sends_rows(one, world) for one in shards)),
                "row_cuts": float(any(is_cut(one) for one in shards)),
                "kernels": len({fused_kernel(one.shard.table, one.update) for one in shards if holds(one, rank)}),
                "features": sum(len(one.shard.table.features) for one in shards if holds(one, rank)),
            }
            if part is StepPart.FORWARD_KERNEL:
                amounts["model_ms"] = forward_R[rank]
                amounts["million_lengths"] = sent_RR["lengths"][:, rank].sum() / 4e6
            if part is StepPart.BACKWARD_KERNEL:
                amounts["model_ms"] = backward_R[rank]
            if part in (StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE):
                amounts["megabytes"] = handled[EXCHANGED[part][0]][rank] / 1e6
            of_ranks.append(sum(w * amounts[name] for w, name in zip(weights[part], PART_FEATURES[part], strict=True)))
        parts[part] = max(of_ranks)
    return parts, max(synced_ms(plan, shards, costs, rank) for rank in range(world))


def sends_rows(placed, world):
    return placed.as_run(world).exchange is Exchange.ROWS and placed.shard.table.pooling is not Pooling.SEQUENCE


def is_cut(placed):
    return len(placed.replicas[0]) > 1 or placed.shard.num_embeddings < placed.shard.table.num_embeddings


def weights_of(part, costs, topology):
    weights = None if costs.step is None else costs.step.coefficients(part, "", topology)
    work = ENGINE_WORK.get(topology.device.split(":")[0], {}).get(part, {})
    return weights or [work.get(name, 1.0 if name.endswith("_ms") else 0.0) for name in PART_FEATURES[part]]


def holds(placed, rank):
    return any(rank in replica for replica in placed.replicas)


def read_by(plan, placed, reader):
    if placed.fetch is not None:
        return placed.fetch[reader]
    node = plan.topology.node_of
    own = [index for index, replica in enumerate(placed.replicas) if reader in replica]
    near = [index for index, replica in enumerate(placed.replicas) if node(reader) in map(node, replica)]
    return (own or near or [reader % len(placed.replicas)])[0]


def messages(plan, shards):
    """Bytes of the all-to-all from each rank to each by stream; bytes of a rank's samples that are scattered."""
    world = plan.group_size
    width = id_bytes(plan.tables.tables)
    local_batch = plan.group_batch_size / world
    # Shards of one replica share a message, as do those of several that are held and read alike.
    apart = {}
    scattered = {"forward": 0.0, "backward": 0.0}
    for placed in shards:
        by_stream = pair_bytes([placed], local_batch, plan.payload, id_bytes=width, lookups_factor_N=[1.0])[0]
        many = (placed.replicas, placed.fetch, placed.collective) if len(placed.replicas) > 1 else None
        of_message = apart.setdefault(many, {stream: np.zeros((world, world)) for stream in STREAMS})
        for stream, size in zip(STREAMS, by_stream.tolist(), strict=True):
            if placed.collective is Collective.REDUCE_SCATTER and stream in scattered:
                scattered[stream] += size
                continue
            for reader in range(world):
                for owner in placed.replicas[read_by(plan, placed, reader)]:
                    place = (owner, reader) if stream == "forward" else (reader, owner)
                    of_message[stream][place] += size
    total = {stream: np.zeros((world, world)) for stream in STREAMS}
    for many, of_message in apart.items():
        stays = many is not None and all(many[0][read_in(plan, many, rank)] == (rank,) for rank in range(world))
        for stream, dtype in (("forward", plan.payload.forward), ("backward", plan.payload.backward)):
            if dtype is DType.INT8 and not stays:
                block = INT8_BLOCK + 8
                of_message[stream] = np.ceil(of_message[stream] / block) * block
        for stream in STREAMS:
            total[stream] += of_message[stream]
    return total, scattered


def read_in(plan, many, rank):
    replicas, fetch, _ = many
    some = next(one for one in plan.shards if one.replicas == replicas and one.fetch == fetch)
    return read_by(plan, some, rank)


def kernels(plan, shards, costs):
    """Forward and backward of each rank's shards, each as the rank runs it."""
    world = plan.group_size
    held = []
    for rank in range(world):
        mine = []
        for placed in shards:
            for index, replica in enumerate(placed.replicas):
                if rank in replica:
                    readers = sum(read_by(plan, placed, reader) == index for reader in range(world))
                    share = readers / world if placed.fetch is not None else 1 / len(placed.replicas)
                    mine.append(local_shard(placed, group_batch_size=plan.group_batch_size, bags_share=share))
        held.append(mine)
    priced = set_costs(costs.kernel, held)
    return priced.forward_ms_S, priced.backward_ms_S


def reading(plan, shards):
    """What a rank works on what it reads: all ranks read as many samples of everything."""
    local_batch = plan.group_batch_size / plan.group_size
    total = np.zeros(len(EXCHANGED))
    for placed in shards:
        total += reader_ms([placed], local_batch, plan.topology)[0]
    return total


def synced_ms(plan, shards, costs, rank):
    synced_2 = np.zeros(2)
    for placed in shards:
        if placed.grad_sync is not GradSync.NONE and holds(placed, rank):
            synced_2 += whole_share(placed.replicas, plan.topology) * sync_bytes([placed], plan.group_batch_size)[0]
    reduced, gathered = synced_2.tolist()
    topology = plan.topology

    def collective_ms(name, num_bytes):
        return costs.comm.collective_ms(name, num_bytes, topology)

    # Without dense layers no step model was calibrated on the rest of the step.
    work = ENGINE_WORK.get(topology.device.split(":")[0], {}).get(StepPart.DENSE, {})
    ms = collective_ms("all_reduce", reduced) + work.get("synced_megabytes", 0.0) * (reduced + gathered) / 1e6
    if reduced or gathered:
        ms += work.get("row_sums", 0.0)
    if gathered:
        ms += collective_ms("all_gather", 8 * topology.world_size) + collective_ms("all_gather", gathered)
    return ms
