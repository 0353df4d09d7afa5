"""The study `oper`: `python -m studies oper`."""

from __future__ import annotations

from studies.frame import OutputOptions, StudyResult
from studies.papers.oper.document import OperResults, results_document, results_tables
from studies.papers.oper.figures import fig8_figure, fig10_figure
from studies.papers.oper.reference import against_exact
from studies.papers.oper.results import (
    MODES,
    RATIO,
    SETTINGS,
    costs_by_link,
    exchange_by_memory,
    exchange_by_threshold,
    loads_by_method,
    search_times,
)
from studies.papers.oper.tasks import avazu, kaggle, terabyte


def main(output: OutputOptions) -> None:
    """Plans OPER's data sets, prints its Tables 2 and 3 beside ours, and draws its Fig. 8 and 10.

    CP-SAT takes three or four minutes of it; it needs `pip install 'autoshard[exact]'`.

    Example:
        python -m studies oper -o docs/figures
    """
    # First, while this process has little memory of its own.
    searches = search_times()
    data = {"Avazu": avazu(), "Criteo Kaggle": kaggle(), "Criteo Terabyte": terabyte()}
    references = [against_exact(name, tables, ratio) for name, tables in data.items() for ratio in (0.0, RATIO)]
    exact = {one.data: one.loads for one in references if one.ratio == RATIO}
    results = OperResults(
        by_memory={name: {mode: exchange_by_memory(tables, mode) for mode in MODES} for name, tables in data.items()},
        by_threshold=[exchange_by_threshold(mode, ratio) for mode, ratio in SETTINGS],
        references=references,
        searches=searches,
        by_link=costs_by_link(),
        by_method={name: {**loads_by_method(tables), "CP-SAT": exact[name]} for name, tables in data.items()},
    )
    output.write(
        StudyResult(
            name="oper",
            document=results_document(results),
            tables=results_tables(results),
            images={"-fig8": fig8_figure(results.by_link), "-fig10": fig10_figure(results.by_method)},
        )
    )
