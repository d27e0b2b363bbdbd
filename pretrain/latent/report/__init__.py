"""What the latent family adds to ``capt report``: Tables 1 to 5 and 7 and Figures 3 and 4 of its paper, ours beside.

Runs of text become rows by their configuration. Their figures are those that ``capt evaluate RUN`` left in the run
folder (test text), else those of the best validation; the report says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pretrain.base.errors import DataError
from pretrain.config.load import flatten, load_job
from pretrain.latent.artifacts import EVALUATION
from pretrain.latent.report.plots import bounds_figure, dropout_figure, scatter_figures, shown_steps, training_figure
from pretrain.latent.report.rows import cluster_label, is_clusters, is_latent, text_rows
from pretrain.latent.report.tables import BOUNDS, CODES, code_table, generated_table, likelihood_table
from pretrain.report.document import ReportSection, Table
from pretrain.report.runs import RunRecord, read_run
from pretrain.report.sweeps import Configuration, SweepRecord

_CLUSTER_FIGURES = ("purity", "purity_cosine", "silhouette", "probe", "accuracy", "loss")


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Sections of latent runs; none without one."""
    sections = []
    runs = [_checked(run) for run in runs if is_latent(run)]
    rows = text_rows(runs)
    if rows:
        tables = [likelihood_table(rows), code_table(rows)]
        figures = [*bounds_figure(rows), *training_figure(rows), *dropout_figure(rows)]
        data = {str(row.run.folder): {**row.figures, **row.generated} for row in rows}
        sections.append(
            ReportSection("Latent-variable models (Tables 1 to 3 and 7)", tables=tables, remarks=[BOUNDS, CODES],
                    figures=figures, data=data)
        )  # fmt: skip
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
    """The same of each study's best configuration: the seeds that were evaluated, else the first one that is done."""
    runs = []
    for sweep in sweeps:
        for study in sweep.studies:
            if study.config.get("task.type") == "latent" and study.best is not None:
                runs += _runs_of(study.best)
    return run_sections(runs)


def _runs_of(best: Configuration) -> list[RunRecord]:
    runs = []
    for trial in best.trials:
        if trial.done:
            try:
                runs.append(read_run(trial.run))
            except DataError:  # the folder was removed, or is on another machine
                continue
    return [run for run in runs if (run.folder / EVALUATION.format(split="test")).is_file()] or runs[:1]


def _checked(run: RunRecord) -> RunRecord:
    """The run with the whole configuration of its job. Raises ``ConfigError``, if it is none of a latent job."""
    job = load_job(str(run.folder / "config.yaml"), resolved=True)
    return replace(run, config=flatten(job.model_dump(mode="json", by_alias=True)))


def _cluster_table(runs: Sequence[RunRecord]) -> Table:
    header = [
        "model",
        "K",
        "step",
        "k-means purity",
        "purity, cosine",
        "silhouette",
        "linear probe",
        "reconstructed",
        "loss, nats",
    ]
    rows = []
    for run in runs:
        kept = {row.step: row.figures for row in run.validation}
        for step in shown_steps(kept):
            figures = [f"{kept[step][name]:.3f}" if name in kept[step] else "" for name in _CLUSTER_FIGURES]
            rows.append([cluster_label(run.config), str(run.config["data.clusters"]), f"{step:,}", *figures])
    return Table(header, rows)
