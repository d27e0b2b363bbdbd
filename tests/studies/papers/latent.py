"""The part of ``capt report`` for latent runs: Tables 1 to 5 and 7, Figures 3 and 4 of the paper beside our results.

The configuration of a run of text decides which row of the tables it is. Its metrics are those that ``capt evaluate
RUN`` left in the run folder (test text), else those of the best validation; the report says which.
"""

from __future__ import annotations

from collections.abc import Sequence

from capt.pretrain.latent.config import EVALUATION
from capt.pretrain.report.document import ReportSection, Table
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.report.sweeps import SweepRecord
from tests.studies.papers.latent_plots import (
    bounds_figure,
    dropout_figure,
    scatter_figures,
    shown_steps,
    training_figure,
)
from tests.studies.papers.latent_table import (
    BOUND_REMARK,
    CODE_REMARK,
    bounds_table,
    cluster_label,
    code_table,
    generated_table,
    is_clusters,
    is_latent,
    likelihood_table,
    text_rows,
)
from tests.studies.papers.runs import best_runs, with_defaults

_CLUSTER_METRICS = ("purity", "purity_cosine", "silhouette", "probe", "accuracy", "loss")


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Write the sections of the latent runs among ``runs``."""
    sections = []
    runs = [with_defaults(run) for run in runs if is_latent(run)]
    rows = text_rows(runs)
    if rows:
        tables = [likelihood_table(rows), bounds_table(rows), code_table(rows)]
        figures = [*bounds_figure(rows), *training_figure(rows), *dropout_figure(rows)]
        data = {str(row.run.folder): {**row.metrics, **row.estimates, **row.generated} for row in rows}
        name = "Latent-variable models (Tables 1 to 3 and 7)"
        remarks = [BOUND_REMARK, CODE_REMARK]
        sections.append(ReportSection(name, tables=tables, remarks=remarks, figures=figures, data=data))
        generated = generated_table(rows)
        if generated.rows:
            sections.append(ReportSection("Generated text (Table 4): 5-gram perplexity", tables=[generated]))
    clusters = [run for run in runs if is_clusters(run)]
    if clusters:
        sections.append(
            ReportSection(
                "Synthetic clusters (Table 5)", tables=[_cluster_table(clusters)], figures=scatter_figures(clusters)
            )
        )
    return sections


def sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """Write the sections of each study's best setting: the seeds that were evaluated, else the first that is done."""
    chosen = []
    for runs in best_runs(sweeps, "latent"):
        chosen += [run for run in runs if (run.folder / EVALUATION.format(split="test")).is_file()] or runs[:1]
    return run_sections(chosen)


def _cluster_table(runs: Sequence[RunRecord]) -> Table:
    header = ["model", "K", "step", "k-means purity", "purity, cosine", "silhouette", "linear probe", "reconstructed",
              "loss, nats"]  # fmt: skip
    rows = []
    for run in runs:
        validations = {row.step: row.figures for row in run.validation}
        for step in shown_steps(validations):
            metrics = validations[step]
            cells = [f"{metrics[name]:.3f}" if name in metrics else "" for name in _CLUSTER_METRICS]
            rows.append([cluster_label(run.config), str(run.config["data.clusters"]), f"{step:,}", *cells])
    return Table(header, rows)
