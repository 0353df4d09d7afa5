"""Planning from end to end: which models price a task, a planner's plan checked and priced, planners side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autoshard import __version__
from autoshard.core import (
    CostBreakdown,
    CostModel,
    CostModels,
    ImpliedOrder,
    LocalShard,
    PlacedShard,
    Provenance,
    RowOrder,
    RowsBy,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
    local_shards,
)
from autoshard.core.costs import MeasuredRange, OutsideRange, Risk
from autoshard.core.errors import AutoshardError, InvalidOptionError, InvalidPlanError
from autoshard.core.machine import KnowsMachine, device_family
from autoshard.core.quoting import printable, shortened
from autoshard.core.step import Overlap
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.evaluation.batch_memory import rank_memory, training_bytes
from autoshard.evaluation.cached_rows import in_device_memory
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.evaluation.evaluate import evaluate
from autoshard.evaluation.executable import plan_note
from autoshard.evaluation.step_price import model_names
from autoshard.evaluation.unseen_kernels import UnseenKernelsModel, kernels_of, pricing
from autoshard.evaluation.upper_end import UpperEndKernels, at_upper_end
from autoshard.formats.documents.fields import MAX_TEXT
from autoshard.hardware import is_of_device, this_processor
from autoshard.planners.auto_options import AUTO, AutoOptions
from autoshard.planners.plan_bounds import plan_bounds
from autoshard.planners.planner import PlanRequest, options_kept, parse_options
from autoshard.planners.refine import MeasurePlans, refine
from autoshard.planners.registry import OptionHelp, PlannerHelp, describe_planners, get_planner, planner_names
from autoshard.planners.space.options import ShardingType
from autoshard.plugins import kernel_model_loaders, step_models
from autoshard.results.comparison import ComparedPlan, Comparison
from autoshard.validator import validate_plan

__all__ = [
    "OptionHelp",
    "PlanRequest",
    "PlannerHelp",
    "Risk",
    "compare",
    "describe_planners",
    "finished_plan",
    "get_planner",
    "kernel_model",
    "machine_note",
    "machine_notes",
    "make_costs",
    "make_plan",
    "plan_costs",
    "planner_names",
    "refine_plan",
    "repriced",
    "with_bounds",
]

_log = logging.getLogger(__name__)


def kernel_model(topology: Topology, registry: Path | None = None) -> CostModel:
    """The model that prices kernels: the first that a plugin has for the device, else the analytic one.

    Args:
        topology: Names the device, and may state how fast its memory is, which the analytic model goes by.
        registry: Folder of trained models; None for the default.

    Raises:
        ModelError: If a model is there but damaged.
    """
    for load in kernel_model_loaders():
        model = load(registry, topology.device)
        if model is not None:
            return model
    return _analytic_model(topology)


def _analytic_model(topology: Topology) -> AnalyticCostModel:
    return AnalyticCostModel.for_device(topology.device, topology.memory_bandwidth.hbm)


def make_costs(
    tables: TableSet, topology: Topology, registry: Path | None = None, *, risk: Risk = Risk.MEAN
) -> CostModels:
    """Models that price plans of a task.

    Collectives without a trained model are priced by the topology's latencies and bandwidths, dense layers
    analytically, and steps as the sum of their parts.

    Kernels that a trained model has never seen are priced by the analytic one, all others by the trained one. A line in
    the log says of how many tables, and which kernels; every answer names the models that it comes from.

    Raises:
        ModelError: As `kernel_model`.
    """
    return _costs_of(lambda: _whole_shards(tables), topology, registry, risk, with_all_kernels=True)


def plan_costs(plan: ShardingPlan, registry: Path | None = None, *, risk: Risk = Risk.MEAN) -> CostModels:
    """Models that price a plan as it is, whatever its shards; as `make_costs` otherwise.

    Raises:
        ModelError: As `kernel_model`.
    """
    return _costs_of(
        lambda: [held.local for held in plan.held_shards()], plan.topology, registry, risk, with_all_kernels=False
    )


def _costs_of(
    to_price: Callable[[], Sequence[LocalShard]],
    topology: Topology,
    registry: Path | None,
    risk: Risk,
    *,
    with_all_kernels: bool,
) -> CostModels:
    """Models that price some shards, and with all kernels everything that they may be cut into.

    The analytic model prices any shard, so that nobody asks which they are.
    """
    model = trained = kernel_model(topology, registry)
    if not isinstance(trained, AnalyticCostModel):
        # Kernels find all rows in the device's memory, wherever these live.
        shards = [in_device_memory(shard) for shard in to_price()]
        analytic = _analytic_model(topology)
        needed = kernels_of(shards) if with_all_kernels else shards
        model, unseen = UnseenKernelsModel.covering(trained, analytic, needed)
        if alone := [shard for shard in shards if shard.kernel_kind in unseen]:
            _log.warning("%s", _unseen_warning(alone, trained.name, analytic.name))
        if isinstance(model, MeasuredRange) and (notes := model.notes(shards)):
            _log.warning("%s: %s", model.name, _range_warning(notes))
    others = step_models(topology.device, registry)
    costs = CostModels(kernel=model, comm=others.comm or AlphaBetaComm(), dense=others.dense, step=others.step)
    for note in machine_notes(costs, topology.device):
        _log.warning("%s", note)
    return at_upper_end(costs, topology.device) if risk is Risk.HIGH else costs


def _whole_shards(tables: TableSet) -> Sequence[LocalShard]:
    """Every table whole, on a rank of its own."""
    whole = [PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables]
    return local_shards(whole, group_batch_size=tables.batch_size, bags_share_N=[1.0] * len(whole))


def _unseen_warning(unseen: Sequence[LocalShard], trained: str, analytic: str) -> str:
    """How many tables have kernels that the trained model has not seen, and which kernels these are."""
    num_tables = len({shard.table for shard in unseen})
    tables = "1 table" if num_tables == 1 else f"{num_tables:,} tables"
    kinds = shortened(", ".join(dict.fromkeys(shard.kernel_kind for shard in unseen)), MAX_TEXT)
    return f"{trained} has not measured kernels of {tables} ({kinds}): {analytic} prices these"


def machine_notes(costs: CostModels, device: str) -> list[str]:
    """Says of which models the prices are of another machine than a topology's.

    Those of collectives, dense layers and steps from older samples know their machine by its name alone, which keys of
    single machines do not have.

    Args:
        costs: The models.
        device: Key of the topology's device; which machines it means, see `is_of_device`.
    """
    fitted: list[tuple[object, str, str]] = [(costs.kernel, "`autoshard calibrate`", "in a minute")]
    others = (
        (costs.comm, "`autoshard train step`", "to samples"),
        (costs.dense, "`autoshard train step`", "to samples"),
        (costs.step, "`autoshard train step --calibrate N`", "to runs"),
    )
    for model, command, how in others:
        machine = model.measured_on if isinstance(model, KnowsMachine) else None
        if device == device_family(device) or (machine is not None and machine.core):
            fitted.append((model, command, how))
    return [note for model, command, how in fitted if (note := machine_note(model, device, command, how))]


def machine_note(model: object, device: str, command: str = "`autoshard calibrate`", how: str = "in a minute") -> str:
    """Says that a model's prices are of another machine than a topology's; empty if they are not, or nobody knows.

    Args:
        model: Prices kernels, collectives, dense layers or steps.
        device: Key of the topology's device; which machines it means, see `is_of_device`.
        command: What fits such a model.
        how: How it does.
    """
    if not isinstance(model, KnowsMachine):
        return ""
    measured_on = model.measured_on
    if measured_on is None or is_of_device(measured_on, device):
        return ""
    if device == device_family(device):
        other, where = f"this machine is {this_processor()}", ""
    else:
        other, where = f"the topology's devices are {device}", " there"
    return f"{model.name}: prices are of {measured_on}, {other}; {command}{where} fits them {how}"


def _range_warning(notes: Sequence[OutsideRange]) -> str:
    """How many shards lie outside the trained range, with the worst value of each field that puts them there."""
    worst = {note.field: note for note in sorted(notes, key=lambda note: note.excess)}
    faults = "; ".join(note.fault for note in sorted(worst.values(), key=lambda note: -note.excess))
    count = "1 shard lies" if len(notes) == 1 else f"{len(notes):,} shards lie"
    return f"{count} outside the range this model was trained on ({faults}): expect wider errors"


def make_plan(name: str, request: PlanRequest) -> ShardingPlan:
    """A planner's plan: checked, priced, and with its provenance.

    Raises:
        UnknownNameError: If there is no such planner.
        InfeasiblePlanError: If the planner found no plan within the memory limits.
        InputError: If an option, a table or the start cannot be used by it.
        ModelError: If it needs a trained model that is not there.
    """
    planner = get_planner(name)
    if request.start is not None and not getattr(planner, "takes_start", False):
        raise InvalidOptionError(f"the planner {name} searches from no start; auto does", field="start")
    options: Any = parse_options(planner.options_type, request.options)
    models = {}
    if getattr(options, "cuts_by_access", False) and (note := _no_order_note(request)):
        _log.warning("%s", printable(note))
        models["unknown_orders"] = note
    provenance = Provenance(
        planner=name,
        version=__version__,
        seed=request.seed,
        options=asdict(options),
        risk=request.costs.risk,
        models=models,
    )
    return finished_plan(planner.plan(request), request.costs, provenance)


def with_bounds(plan: ShardingPlan, costs: CostModels, names: frozenset[ShardingType]) -> ShardingPlan:
    """A priced plan with what no plan of its space takes less than, see `plan_bounds`.

    Args:
        plan: A plan with a prediction.
        costs: What it was priced with.
        names: The sharding types of the space, see `searched_types`.
    """
    if plan.predicted is None:
        return plan
    return plan.with_predicted(replace(plan.predicted, bounds=plan_bounds(plan, costs, names)))


def searched_types(planner: str, options: Mapping[str, Any]) -> frozenset[ShardingType]:
    """Sharding types that a planner chooses from: all but what `auto` may not use by its options.

    Args:
        planner: Its name.
        options: Its options; those of another version, or written by hand, count as none.
    """
    if planner != AUTO:
        return frozenset(ShardingType)
    try:
        return parse_options(AutoOptions, options_kept(AutoOptions, options)).types
    except InvalidOptionError:
        return frozenset(ShardingType)


def refine_plan(
    plan: ShardingPlan, costs: CostModels, measure: MeasurePlans, *, num_measurements: int
) -> tuple[ShardingPlan, str]:
    """A plan corrected by what its ranks are measured to take, see `refine`: checked and priced like any plan.

    It leaves free what the plan was asked to.

    Args:
        plan: A plan of `make_plan`, its shards on single ranks.
        costs: What it was planned with.
        measure: Measures plans.
        num_measurements: Most measurements, at least 1.

    Returns:
        The plan, and what measuring changed; its provenance has that text too, as `models.refined`.

    Raises:
        InvalidOptionError: If there are no measurements, or a shard is on several ranks.
    """
    asked = AutoOptions.of_plan(plan)
    # Plans of other planners may have no room for training: they get no less of it.
    fits = asked.has_room if asked.has_room(plan) else (lambda _: True)
    kept_bytes_R = asked.reserved_bytes + asked.counts_activations * training_bytes(plan.of_one_group())
    found = refine(
        plan,
        costs.kernel,
        measure,
        num_measurements=num_measurements,
        kept_bytes_R=kept_bytes_R,
        has_room=fits,
    )
    source = plan.provenance or Provenance(planner="unknown", version=__version__)
    provenance = replace(
        source,
        options={**source.options, "replay_refine": num_measurements},
        models={**source.models, "refined": found.summary},
    )
    return finished_plan(replace(found.plan, predicted=None, provenance=None), costs, provenance), found.summary


def finished_plan(plan: ShardingPlan, costs: CostModels, provenance: Provenance) -> ShardingPlan:
    """A plan checked, priced, and with its provenance; to `models` comes what priced it, and what the plan itself says.

    Raises:
        AutoshardError: If it is invalid.
    """
    try:
        validate_plan(plan)
    except InvalidPlanError as error:
        # The planner's fault, not that of whoever asked for a plan.
        raise AutoshardError(f"made an invalid plan: {error}", source=f"planner {provenance.planner}") from error
    orders = _orders_of_cut(plan)
    held = _priced_shards(plan, costs)
    _warn_of_unseen(plan.tables, held, costs.kernel)
    costs = replace(costs, kernel=pricing(costs.kernel, held))
    models = {**provenance.models, **_order_notes(orders), **_price_entries(plan, costs, held)}
    if note := plan_note(plan):
        _log.warning("%s", note)
        models["execution_notes"] = shortened(note, MAX_TEXT)
    if plan.provenance is not None:
        models |= plan.provenance.models
    predicted = plan.predicted or evaluate(plan, costs)
    _warn_of_memory(plan, predicted)
    return replace(
        plan,
        row_orders={table: order for table, order in orders.items() if isinstance(order, RowOrder)},
        predicted=predicted,
        provenance=replace(provenance, models=models),
    )


def repriced(plan: ShardingPlan, costs: CostModels, *, overlap: Overlap | None = None) -> ShardingPlan:
    """A plan with other prices; its provenance, where it has one, names what these are and come from.

    Args:
        plan: A valid plan.
        costs: What prices it, see `plan_costs`.
        overlap: Which parts of the step are taken to run at the same time; None as in `evaluate`.
    """
    held = _priced_shards(plan, costs)
    costs = replace(costs, kernel=pricing(costs.kernel, held))
    priced = plan.with_predicted(evaluate(plan, costs, overlap=overlap))
    if plan.provenance is None:
        return priced
    kept = {name: text for name, text in plan.provenance.models.items() if name not in _PRICE_ENTRIES}
    models = {**kept, **_price_entries(plan, costs, held)}
    return replace(priced, provenance=replace(plan.provenance, risk=costs.risk, models=models))


def _priced_shards(plan: ShardingPlan, costs: CostModels) -> list[LocalShard]:
    """The shards that a model of kernels is chosen and asked by; none for the analytic one, which prices any."""
    if isinstance(costs.kernel, AnalyticCostModel):
        return []
    return [in_device_memory(shard.local) for shard in plan.of_one_group().held_shards()]


#: Entries of a provenance's `models` that say what a plan's prices come from.
_PRICE_ENTRIES = ("kernel", "communication", "dense", "step", "kernel_notes", "kernel_machine", "machine_notes")


def _price_entries(plan: ShardingPlan, costs: CostModels, held: Sequence[LocalShard]) -> dict[str, str]:
    """Of `_PRICE_ENTRIES`, those of a plan that is priced by these models; `held` are its `_priced_shards`."""
    entries = model_names(costs, plan.tables, plan.topology.device)
    if isinstance(costs.kernel, MeasuredRange) and (notes := costs.kernel.notes(held)):
        entries["kernel_notes"] = _notes_text(notes, plan.tables)
    if isinstance(costs.kernel, KnowsMachine) and costs.kernel.measured_on is not None:
        entries["kernel_machine"] = str(costs.kernel.measured_on)
    if of_others := machine_notes(costs, plan.topology.device):
        entries["machine_notes"] = shortened("; ".join(of_others), MAX_TEXT)
    return entries


def _warn_of_unseen(tables: TableSet, held: Sequence[LocalShard], model: CostModel) -> None:
    """Says in the log which shards the kernel model has not seen, where it has seen their tables whole."""
    if isinstance(model, UpperEndKernels):
        model = model.model
    if isinstance(model, UnseenKernelsModel):
        known = {shard.kernel_kind for shard in _whole_shards(tables)}
        if cut := [shard for shard in held if model.is_unseen(shard) and shard.kernel_kind not in known]:
            _log.warning("%s", _unseen_warning(cut, model.model.name, model.other.name))


def _warn_of_memory(plan: ShardingPlan, predicted: CostBreakdown) -> None:
    """Says in the log where tables fit, and training on a batch does not."""
    full = [one for one in rank_memory(plan, predicted) if one.free_bytes < 0]
    if full:
        _log.warning(
            "%d of %d ranks have room for their tables, but not for training on a batch besides: `autoshard show` says "
            "how full they are, and the planner auto leaves room",
            len(full),
            len(predicted.ranks),
        )


def _orders_of_cut(plan: ShardingPlan) -> dict[str, RowOrder | ImpliedOrder | None]:
    """Row orders of the tables that a plan cuts by access rank, by name."""
    shards = [placed.shard for placed in plan.shards if placed.shard.rows.by is RowsBy.ACCESS_RANK]
    return {shard.table.name: shard.table.row_order for shard in shards}


def _order_notes(orders: Mapping[str, RowOrder | ImpliedOrder | None]) -> dict[str, str]:
    """What a plan needs that is cut by row orders which are assumed."""
    tables = [table for table, order in orders.items() if order is ImpliedOrder.ASSUMED]
    if not tables:
        return {}
    text = (
        "cut by access rank with assumed row orders: before training, count lookups per row, import them with "
        "`autoshard import COUNTS --format row-counts --row-orders`, and plan again; "
    )
    return {"row_orders": text + _named(tables, MAX_TEXT - len(text))}


def _no_order_note(request: PlanRequest) -> str:
    """Says which tables are not cut by how often rows are looked up, for it is unknown which rows those are."""
    if request.topology.world_size == 1:
        return ""
    # Of rows that are all looked up alike, none is hot.
    tables = [one.name for one in request.tables.tables if one.row_order is None and len(one.access.ranks_K) > 2]
    if not tables:
        return ""
    text = (
        "hot rows are held as all others, since it is not known which rows are hot: --assume-row-order (in tables.json "
        '"row_order": "assumed") plans as if it was, `autoshard import COUNTS --format row-counts --row-orders` tells; '
    )
    return text + _named(tables, MAX_TEXT - len(text))


def _named(tables: Sequence[str], most: int) -> str:
    """As many names as a text of that many characters holds, and how many more there are; none if not even one."""
    for count in range(min(len(tables), most), 0, -1):
        left = len(tables) - count
        text = f"tables: {', '.join(tables[:count])}" + (f" and {left} more" if left else "")
        if len(text) <= most:
            return text
    return ""


def _notes_text(notes: Sequence[OutsideRange], tables: TableSet) -> str:
    """The warning, and after it the names of as many tables as a text of `plan.json` holds."""
    summary = _range_warning(notes)
    noted = {note.table for note in notes}
    named = _named([table.name for table in tables.tables if table.name in noted], MAX_TEXT - len(summary) - 2)
    return f"{summary}; {named}" if named else summary


def compare(
    planners: Sequence[str],
    request: PlanRequest,
    *,
    options: Mapping[str, Mapping[str, object]] | None = None,
    on_planned: Callable[[ComparedPlan], None] | None = None,
) -> Comparison:
    """Plans one task with several planners.

    Args:
        planners: Their names, in the order of the answer.
        request: The task; its options are not used.
        options: Options by planner.
        on_planned: Called after each planner, for progress bars.

    Returns:
        One row per planner. A planner that cannot do the task has a row with the reason, and the others go on.

    Raises:
        UnknownNameError: If there is no such planner; before any has started.
    """
    for name in planners:
        get_planner(name)
    rows = []
    for name in planners:
        started = time.perf_counter()
        plan, failure = None, None
        try:
            plan = make_plan(name, replace(request, options=(options or {}).get(name, {}), started_s=None))
        except AutoshardError as error:
            failure = error
        rows.append(ComparedPlan(planner=name, planning_s=time.perf_counter() - started, plan=plan, failure=failure))
        if on_planned is not None:
            on_planned(rows[-1])
    return Comparison(rows)
