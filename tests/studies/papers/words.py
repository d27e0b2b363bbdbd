"""The part of ``capt report`` for word embeddings: word similarity by both rules, training, and the paper's curves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from matplotlib.axes import Axes
from pydantic import Field, FiniteFloat

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.embeddings.similarity import CASE_RULE, RULES
from capt.pretrain.engine.evaluations import EVALUATION
from capt.pretrain.report.compare import compare
from capt.pretrain.report.document import ReportFigure, ReportSection, Table, number
from capt.pretrain.report.plots import Theme, colour, count_steps, draw, legend_lines, smooth, style_axis
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.report.sweeps import SweepRecord
from tests.studies.papers.runs import best_runs, with_defaults

CURVES = (
    ("loss", "discriminator's loss", "nats a pair"),
    ("generator_loss", "generator's loss", "REINFORCE"),
    ("penalty", "mean normalised penalty", "- reward"),
    ("generator_entropy", "generator's entropy", "nats"),
    ("distinct_rate", "distinct samples", "share of draws"),
)
"""Metrics with a panel each: the paper's figures 1 to 9 are the first three."""

PUBLISHED: dict[tuple[str, str], float] = {
    ("C&W", "before"): 26.75,
    ("C&W", "ACE"): 32.86,
    ("C&W", "noise + ACE"): 37.69,
    ("GloVe", "before"): 33.94,
    ("GloVe", "noise + ACE"): 36.37,
}
"""Table 2 of the paper: Spearman's rho x 100 on Rare Word by start and method; ``before`` is without fine-tuning."""

PUBLISHED_REMARK = (
    "Published: Table 2 of Adversarial Contrastive Estimation, 50-dimensional vectors, fine-tuned. The paper does not "
    "say how it counts pairs without a vector, and has C&W's figure before from Luong et al. (2013). Beside them are "
    "runs from 50-dimensional vectors whose file is named after GloVe or C&W, measured on all of Rare Word's 2,034 "
    "pairs."
)
_RARE_WORD, _PAIRS, _WIDTH = re.compile(r"(?i)rare.?word|(?<![a-z])rw(?![a-z])"), 2034, 50
_STARTS = {"GloVe": re.compile(r"(?i)glove"), "C&W": re.compile(r"(?i)c&w|collobert|turian|(?<![a-z])cw(?![a-z])")}


class SetRecord(Record):
    """The figures of one set, as ``capt evaluate`` wrote them."""

    pairs: Count
    covered: Count
    drop: Annotated[FiniteFloat | None, Field(strict=False)]
    zero: Annotated[FiniteFloat | None, Field(strict=False)]


class EvaluationRecord(Record):
    """The part of an evaluation file that a report shows."""

    words: Count
    dimensions: Count | None = None
    word_similarity: dict[Annotated[str, Field(max_length=1000)], SetRecord] = Field({}, max_length=10_000)


@dataclass(frozen=True)
class MethodRow:
    """The runs of one configuration, which differ in the seed, with the evaluations of those that were measured."""

    label: str
    runs: list[RunRecord]
    evaluations: list[EvaluationRecord]


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Write the sections of the runs of word embeddings among ``runs``."""
    own = [with_defaults(run) for run in runs if run.config.get("task.type") == "ace"]
    if not own:
        return []
    rows = method_rows(own)
    sections = [ReportSection("Word embeddings", tables=[training_table(rows)], figures=curves_figure(rows))]
    if any(row.evaluations for row in rows):
        remarks = [f"{name}: {what}." for name, what in RULES.items()] + [f"Upper case: {CASE_RULE}."]
        for rule in RULES:
            title = f"Word similarity, Spearman's rho x 100, unknown words: {rule}"
            sections.append(ReportSection(title, tables=[similarity_table(rows, rule)]))
        if any(map(_RARE_WORD.search, _set_names(rows))):
            title = "Rare Word beside the paper (Table 2)"
            sections.append(ReportSection(title, tables=[published_table(rows)], remarks=[PUBLISHED_REMARK]))
        data = {row.label: [each.model_dump() for each in row.evaluations] for row in rows}
        sections.append(
            ReportSection("Word similarity: pairs covered", tables=[coverage_table(rows)], remarks=remarks, data=data)
        )
    return sections


def sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """Write the sections of each study's best setting."""
    return run_sections([run for runs in best_runs(sweeps, "ace") for run in runs])


def method_of(config: Mapping[str, Any]) -> str:
    """Return the paper's name of a (flat) configuration: NCE represents fixed noise, whatever the objective is."""
    sampler, objective = config["negatives.sampler"], config["objective.type"]
    if sampler == "noise":
        name = "self-adversarial" if config["negatives.weights"] == "self_adversarial" else "noise"
    else:
        name = {"generator": "ACE", "mixture": "noise + ACE"}[sampler]
        name += ", self-adversarial" if config["negatives.weights"] == "self_adversarial" else ""
    start = ", fine-tuned" if config.get("model.init") else ""
    return f"{name} ({objective}{start})"


def method_rows(runs: Sequence[RunRecord]) -> list[MethodRow]:
    """Group runs by configuration; what differs is named where two groups are of one method."""
    groups = compare(runs).groups
    names = [method_of(group.runs[0].config) for group in groups]
    counts = Counter(names)
    rows = []
    for group, name in zip(groups, names, strict=True):
        label = name if counts[name] == 1 else f"{name}; {group.label.partition(': ')[2] or group.label}"
        found = [evaluation for run in group.runs if (evaluation := newest_evaluation(run.folder)) is not None]
        rows.append(MethodRow(label, group.runs, found))
    return rows


def newest_evaluation(folder: Path) -> EvaluationRecord | None:
    """Read what ``capt evaluate`` left of the latest checkpoint; None where nothing was measured.

    Raises:
        DataError: the file is damaged.
    """
    files: dict[int, Path] = {}
    for path in folder.glob(EVALUATION.format(checkpoint="step-*")):
        if match := re.fullmatch(r"evaluation-step-(\d{1,18})", path.stem):
            files[int(match[1])] = path
    return read_record(EvaluationRecord, files[max(files)], error=DataError) if files else None


def training_table(rows: Sequence[MethodRow]) -> Table:
    """Write the seeds, speed and last metrics of every method."""
    cells = []
    for row in rows:
        steps = sorted({run.last_step for run in row.runs})
        cells.append(
            {
                "method": row.label,
                "runs": str(len(row.runs)),
                "steps": " to ".join(f"{step:,}" for step in dict.fromkeys((steps[0], steps[-1]))),
                "raw words / s": _spread(_last(row, "words_per_second", fmean), 0),
                **{name: _spread(_last(row, key), 3) for key, name, _ in CURVES},
            }
        )
    return Table.of(cells)


def _last(row: MethodRow, key: str, summary: Callable[[Sequence[float]], float] | None = None) -> list[float]:
    """The last value of a metric in each run, or a summary of all its values."""
    values = [run.series(key, validation=False)[1] for run in row.runs]
    return [summary(each) if summary is not None else each[-1] for each in values if each]


def similarity_table(rows: Sequence[MethodRow], rule: str) -> Table:
    """Write Spearman's rho times 100 of every method and set by one rule: mean and deviation over the seeds."""
    names = _set_names(rows)
    cells = []
    for row in rows:
        found = [[getattr(each.word_similarity.get(name), rule, None) for each in row.evaluations] for name in names]
        values = [[value for value in each if value is not None] for each in found]
        cells.append([row.label, str(len(row.evaluations)), *(_spread(each, 2) for each in values)])
    return Table(["method", "measured", *names], cells)


def published_table(rows: Sequence[MethodRow]) -> Table:
    """Write the paper's figures on Rare Word, and by both rules those of the runs that have its start and method."""
    cells = []
    for (start, method), published in PUBLISHED.items():
        found: dict[str, list[float]] = {rule: [] for rule in RULES}
        for row in rows:
            config = row.runs[0].config
            name = Path(str(config.get("model.init") or "")).name
            if _STARTS[start].search(name) and method_of(config).partition(" (")[0] == method:
                for each, rule in product(_rare_word(row), RULES):
                    value = getattr(each, rule)
                    found[rule] += [] if value is None else [value]
        ours = {f"ours, {rule}": _spread(values, 2) for rule, values in found.items()}
        cells.append({"start": start, "method": method, "published": number(published, 2), **ours})
    return Table.of(cells, always=3)


def _rare_word(row: MethodRow) -> list[SetRecord]:
    """The results on the whole of Rare Word of runs whose vectors have the paper's width."""
    return [
        result
        for each in row.evaluations
        for name, result in each.word_similarity.items()
        if _RARE_WORD.search(name) and result.pairs == _PAIRS and each.dimensions == _WIDTH
    ]


def coverage_table(rows: Sequence[MethodRow]) -> Table:
    """Write how many pairs of every set have vectors for both words."""
    names = _set_names(rows)
    cells = []
    for row in rows:
        words = sorted({each.words for each in row.evaluations})
        line = [row.label, ", ".join(f"{number:,}" for number in words)]
        for name in names:
            sets = [each.word_similarity[name] for each in row.evaluations if name in each.word_similarity]
            line.append(", ".join(dict.fromkeys(f"{each.covered:,} of {each.pairs:,}" for each in sets)))
        cells.append(line)
    return Table(["method", "words", *names], cells)


def _set_names(rows: Sequence[MethodRow]) -> list[str]:
    return sorted({name for row in rows for each in row.evaluations for name in each.word_similarity})


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return number(fmean(values), digits) + deviation if values else ""


def curves_figure(rows: Sequence[MethodRow]) -> list[ReportFigure]:
    """Plot losses, penalty, entropy and distinct samples over training, a colour for each method."""
    panels = [
        curve for curve in CURVES if any(run.series(curve[0], validation=False)[0] for r in rows for run in r.runs)
    ]
    if not panels:
        return []

    def paint(axis: Axes, panel: tuple[str, str, str], theme: Theme) -> None:
        key, name, unit = panel
        for i, row in enumerate(rows):
            for run in row.runs:
                steps, values = run.series(key, validation=False)
                marker = "." if len(values) == 1 else None  # a line through one point is invisible
                shade, label = colour(i, theme), row.label
                axis.plot(steps, smooth(values), color=shade, linewidth=1.4, marker=marker, label=label)
        style_axis(axis, name, "optimizer step", unit, theme)
        count_steps(axis, max(run.last_step for row in rows for run in row.runs))

    return [draw("word-embeddings", panels, lambda theme: legend_lines([row.label for row in rows], theme, 2.0), paint)]
