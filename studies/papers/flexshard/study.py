"""The study `flexshard`: `python -m studies flexshard`."""

from __future__ import annotations

from studies.frame import OutputOptions, StudyResult
from studies.papers.flexshard.document import results_document, results_tables
from studies.papers.flexshard.figures import fig1_figure, fig3_figure, fig5_figure, fig6_figure, fig7_figure
from studies.papers.flexshard.results import fig1_costs, fig3_costs, fig5_frontier, fitted_machine, model_results


def main(output: OutputOptions) -> None:
    """Plans FlexShard's four models, prints its Tables 5 and 6 beside them, and draws its Fig. 1, 3, 5, 6 and 7.

    Example:
        python -m studies flexshard -o docs/figures
    """
    machine = fitted_machine()
    results = model_results()
    frontier, histories, replicas = fig5_frontier(machine), fig1_costs(machine), fig3_costs(machine)
    output.write(
        StudyResult(
            name="flexshard",
            document=results_document(machine, results, frontier, histories, replicas),
            tables=results_tables(results, frontier, histories),
            images={
                "-fig1": fig1_figure(histories),
                "-fig3": fig3_figure(replicas),
                "-fig5": fig5_figure(frontier),
                "-fig6": fig6_figure(results),
                "-fig7": fig7_figure(results),
            },
        )
    )
