"""Contests in the proportions of three papers, small enough for processes of one machine."""

from __future__ import annotations

from dataclasses import replace

from autoshard.core import AccessProfile, Collective, DenseLayers, EmbeddingTable, Feature, GradSync, TableSet, Tier
from autoshard.runtime import Engine
from studies.papers.flexshard.models import LOCAL_BATCH, MODELS, PaperModel
from studies.papers.oper.results import THRESHOLD
from studies.papers.oper.tasks import kaggle
from studies.runtime.slow_links.contests import TORCHREC_WHOLE, Contest, Entry

#: Rows and batches of FlexShard's models are divided by it; lookups per sample and coverage stay.
FLEXSHARD_SCALE, FLEXSHARD_DIM = 512, 32
#: The same of OPER's data.
OPER_SCALE = 128
FLEXSHARD, OPER, GROUPS, SUMS = "flexshard", "oper", "replica-groups", "sums"
#: Labels of FlexShard's runs, in the order of its Table 6.
TIER_LABELS = ("row-wise", "2-tier", "3-tier")
SPARSE_LABEL, DENSE_LABEL, GATHERED_LABEL = "oper, sparse", "oper, dense", "oper, all-gather"
#: Labels of the contest of collectives.
SCATTERED_LABEL, EXCHANGED_LABEL = "reduce-scatter", "all-to-all"
#: Processes of the contest of replica groups, and its numbers of groups.
GROUPS_RANKS, NUM_GROUPS = 16, (1, 2, 4)
_DENSE = DenseLayers(num_dense_features=13, bottom_mlp=(64, 32), top_mlp=(64, 1))


def flexshard_contest(model: PaperModel, num_ranks: int) -> Contest:
    """Row-wise, 2-tier and 3-tier sharding of one of FlexShard's models (Table 6), with the tiers of Table 5.

    The paper's rule would choose others here, where a node has two ranks to hold a copy and not eight.
    """
    whole = TableSet(batch_size=LOCAL_BATCH * num_ranks, tables=(model.table(model.measured_length),))
    scaled = whole.scaled(FLEXSHARD_SCALE)
    tables = tuple(replace(table, embedding_dim=FLEXSHARD_DIM) for table in scaled.tables)
    all_rows = tables[0].num_embeddings
    two_tier, replicated, flexed = (
        round(share.num_rows / FLEXSHARD_SCALE) for share in (model.two_tier, model.replicated, model.flexed)
    )
    tiers = (
        ((Tier.ROW_WISE, all_rows),),
        ((Tier.DATA_PARALLEL, two_tier), (Tier.ROW_WISE, all_rows)),
        ((Tier.DATA_PARALLEL, replicated), (Tier.FLEX, replicated + flexed), (Tier.ROW_WISE, all_rows)),
    )
    entries = tuple(Entry(label=label, tiers=of_label) for label, of_label in zip(TIER_LABELS, tiers, strict=True))
    return Contest(
        name=f"flexshard-{model.name.lower()}",
        group=FLEXSHARD,
        tables=replace(scaled, tables=tables, dense=_DENSE),
        entries=entries,
    )


def oper_contest(num_ranks: int) -> Contest:
    """OPER's plan of Criteo Kaggle with each way to sum gradients, and TorchRec's planner (Sec. 5.3 and 6).

    Every rank holds the rows that it looks up at least once in a step, by the mean.
    """
    tables = replace(kaggle(num_ranks).scaled(OPER_SCALE), dense=_DENSE)
    papers = {"threshold": THRESHOLD, "copy_frequency": num_ranks / tables.batch_size}
    ways = {SPARSE_LABEL: GradSync.SPARSE, DENSE_LABEL: GradSync.DENSE, GATHERED_LABEL: GradSync.ALL_GATHER}
    entries = (
        *(Entry(label=label, planner="oper", options=papers, grad_sync=how) for label, how in ways.items()),
        Entry(label="torchrec", planner="torchrec"),
        Entry(label=TORCHREC_WHOLE, planner="torchrec", engine=Engine.TORCHREC),
    )
    return Contest(name="oper-kaggle", group=OPER, tables=tables, entries=entries)


def groups_contest(num_ranks: int) -> Contest:
    """Replica groups of tables with few rows, whose copies are cheap beside the exchange of embeddings (2D)."""
    entries = tuple(
        Entry(label=f"{number} groups", planner="replica-groups", options={"num_groups": number})
        for number in NUM_GROUPS
    )
    return Contest(name="replica-groups", group=GROUPS, tables=_equal_tables(500, num_ranks), entries=entries)


def sums_contest(num_ranks: int) -> Contest:
    """Tables split by rows over all ranks, whose sums travel by reduce-scatter or by all-to-all (Neo Fig. 5b)."""
    entries = tuple(
        Entry(label=label, planner="neo", options={"sharding_types": "row_wise"}, collective=collective)
        for label, collective in (
            (SCATTERED_LABEL, Collective.REDUCE_SCATTER),
            (EXCHANGED_LABEL, Collective.ALL_TO_ALL),
        )
    )
    return Contest(name="row-wise-sums", group=SUMS, tables=_equal_tables(20_000, num_ranks), entries=entries)


def _equal_tables(num_rows: int, num_ranks: int) -> TableSet:
    tables = tuple(
        EmbeddingTable(
            name=f"t{index}",
            num_embeddings=num_rows,
            embedding_dim=32,
            features=(Feature(name=f"f{index}", pooling_factor=4.0),),
            access=AccessProfile.zipf(num_rows, 1.05),
        )
        for index in range(24)
    )
    return TableSet(batch_size=128 * num_ranks, tables=tables, dense=_DENSE)


def paper_contests(num_ranks: int) -> tuple[Contest, ...]:
    """Contests on as many ranks as the drawn tasks have."""
    return (
        *(flexshard_contest(model, num_ranks) for model in MODELS),
        oper_contest(num_ranks),
        sums_contest(num_ranks),
    )
