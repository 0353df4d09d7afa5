"""The study `neo`: `python -m studies neo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from autoshard.commands.options import command_options
from autoshard.console import progress
from studies.frame import OutputOptions, PartStore, StudyResult
from studies.frame.options import PartsOption
from studies.papers.neo.document import NeoResults, Priced, chosen_numbers, results_document, results_tables
from studies.papers.neo.figures import fig9_figure, fig10_figure, fig11_figure
from studies.papers.neo.models import MODEL_A, MODEL_I
from studies.papers.neo.results import Outcome, Run, optimisation_runs, outcome, scaling_runs, throughput_runs

#: Planners whose plans are priced; the first one's are drawn in Fig. 10.
_PLANNERS = ("auto", "neo")


@command_options()
class NeoStudyOptions:
    """Options of the study `neo`."""

    parts: PartsOption = None


def main(options: NeoStudyOptions, output: OutputOptions) -> None:
    """Plans and prices Neo's models on ZionEX, prints its Table 3, and draws its Fig. 9, 10 and 11.

    Example:
        python -m studies neo --parts neo-parts -o docs/figures
    """
    results = _results(options.parts)
    output.write(
        StudyResult(
            name="neo",
            document=results_document(results),
            tables=results_tables(results),
            images={
                "-fig9": fig9_figure(results.scaling),
                "-fig10": fig10_figure(results.scaling[_PLANNERS[0]][MODEL_A.name]),
                "-fig11": fig11_figure(results.optimisations),
            },
        )
    )


def _results(folder: Path | None) -> NeoResults:
    throughput = {planner: throughput_runs(planner) for planner in _PLANNERS}
    scaling = {
        planner: {model.name: scaling_runs(model, planner) for model in (MODEL_A, MODEL_I)} for planner in _PLANNERS
    }
    optimisations = {planner: optimisation_runs(planner) for planner in _PLANNERS}
    curves = [runs for of in scaling.values() for runs in of.values()]
    wanted = [run for runs in (*throughput.values(), *curves, *optimisations.values()) for run in runs]
    store = PartStore(folder)
    store.check_identity({"chosen": chosen_numbers()})
    found = _outcomes(wanted, store)

    def with_prices(runs: tuple[Run, ...]) -> Priced:
        return [(run, found[_key(run)]) for run in runs]

    return NeoResults(
        throughput={planner: with_prices(runs) for planner, runs in throughput.items()},
        scaling={planner: {model: with_prices(runs) for model, runs in of.items()} for planner, of in scaling.items()},
        optimisations={planner: with_prices(runs) for planner, runs in optimisations.items()},
    )


def _outcomes(runs: list[Run], store: PartStore) -> dict[str, Outcome]:
    """Prices by `_key`; runs that the tables share are planned once."""
    distinct = {_key(run): run for run in runs}
    found = {}
    with progress("Planning", len(distinct)) as advance:
        for number, (key, run) in enumerate(distinct.items()):
            name = f"{number:02d}-{run.planner}-{run.model.name}-{run.num_ranks}"
            found[key] = store.find_data(name, Outcome, lambda run=run: outcome(run))  # type: ignore[misc]
            advance(1)
    return found


def _key(run: Run) -> str:
    """All that a price depends on."""
    settings = asdict(run)
    del settings["name"], settings["paper_qps"]
    return repr(settings)
