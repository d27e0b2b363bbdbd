"""The tables of docs/results/latent.md: every row by every bound, and paired differences on the same sentences."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.studies.seeds import clustered_error, mean_and_sd
from tests.studies.support import table

BOUNDS = ("ppl_best", "ppl_exact", "ppl_iw_q", "ppl_iw_prior", "ppl_iw_mixture", "ppl_iw_refitted")
BASELINES = ("LM", "VAE")
"""The rows that the others are compared with."""
ERRORS = ("nats a sentence", "± over sentences", "± over lengths")


class Trial(NamedTuple):
    """A run on the test text. Perplexities are upper bounds but ``ppl_dual``, which bounds nothing.

    All are of the sentences that were weighted, but ``rec``, ``kl_exact`` and ``ppl_dual``, which are of all.

    Attributes:
        best_error: standard error of ``ppl_best`` over sentences (delta method).
        best_draw_error: the same over draws.
        bridge_gap: nats a sentence by which ``ppl_best`` lies above annealed importance sampling, on its sentences.
    """

    data: str
    row: str
    seed: int
    epochs: float
    step: str
    rec: float | None
    kl_exact: float | None
    ppl_dual: float | None
    ppl_best: float | None
    ppl_exact: float | None
    ppl_iw_q: float | None
    ppl_iw_prior: float | None
    ppl_iw_mixture: float | None
    ppl_iw_refitted: float | None
    proposal: str | None
    best_nats: float | None
    best_error: float | None
    best_draw_error: float | None
    draws: int | None
    sentences: int | None
    bridge_sentences: int | None
    bridge_gap: float | None
    bridge_gap_error: float | None


def trial_of(data: str, row: str, seed: int, epochs: float, result: Mapping[str, Any]) -> Trial:
    """Read a trial from what ``capt evaluate --out`` wrote; None is what the row does not have."""
    best, bridge = result["ppl_best"], result.get("bridge") or {}
    return Trial(
        data, row, seed, epochs, Path(result["checkpoint"]).name, result.get("rec"), result.get("kl_exact"),
        result.get("ppl_dual"), *(_value(result, name) for name in BOUNDS), best.get("proposal"), best.get("nats"),
        best.get("standard_error"), best.get("draw_error"), best.get("draws"), best.get("sentences"),
        bridge.get("sentences"), bridge.get("tightest_minus_bridge"),
        bridge.get("tightest_minus_bridge_standard_error"),
    )  # fmt: skip


def _value(result: Mapping[str, Any], name: str) -> float | None:
    """A perplexity, of the sentences that were weighted where these were fewer than all."""
    found: Mapping[str, Any] = result.get(f"{name}_there") or result[name]
    return found["value"]


SentencesOf = Callable[[str, str, int], Path]
"""(data, row, seed) -> the file with the bounds of each sentence."""


def write_tables(trials: Sequence[Trial], sentences: SentencesOf, out: Path) -> None:
    """Write the tables of each text."""
    parts = []
    for data in dict.fromkeys(trial.data for trial in trials):
        own = [trial for trial in trials if trial.data == data]
        parts += [f"## {data}", bounds_table(own), differences_table(own, sentences)]
        parts += [seeds_table(own, sentences), bridge_table(own)]
    out.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def bounds_table(trials: Sequence[Trial]) -> str:
    """Perplexity by every bound, mean over the seeds; the tightest with its errors over sentences and over seeds."""
    rows = []
    for row, own in _by_row(trials).items():
        best = [trial.ppl_best for trial in own if trial.ppl_best is not None]
        deviation = mean_and_sd(best)[1] if best else None
        by = ", ".join(dict.fromkeys(trial.proposal or "" for trial in own))
        means = [_mean(own, name) for name in (*BOUNDS[1:], "ppl_dual", "kl_exact", "rec")]
        counts = f"{own[0].sentences:,}, {own[0].draws:,}, {len(own)}"
        rows.append([row, _mean(own, "ppl_best"), _mean(own, "best_error"), _format(deviation), by, *means, counts])
    heads = ["PPL, best bound", "± over sentences", "sd over seeds", "by", "exact KL", "q", "prior", "q and prior",
             "refitted", "dual (no bound)", "KL exact", "reconstruction", "sentences, draws, seeds"]  # fmt: skip
    return table(["row", *heads], rows)


def differences_table(trials: Sequence[Trial], sentences: SentencesOf) -> str:
    """Paired differences of the tightest bounds in nats a sentence, with errors over sentences, lengths and seeds."""
    rows = []
    for row, against, pairs in _pairs(trials):
        found = paired_difference([_both(pair, sentences) for pair in pairs])
        rows.append([row, against, *found.cells(), _format(found.deviation, 2), f"{found.ratio:.3f}"])
    return table(["row", "against", *ERRORS, "sd over seeds", "PPL ratio"], rows)


def seeds_table(trials: Sequence[Trial], sentences: SentencesOf) -> str:
    """The same differences seed by seed."""
    rows = []
    for row, against, pairs in _pairs(trials):
        for pair in pairs:
            found = paired_difference([_both(pair, sentences)])
            rows.append([row, against, str(pair[0].seed), *found.cells()])
    return table(["row", "against", "seed", *ERRORS], rows)


def _pairs(trials: Sequence[Trial]) -> Iterator[tuple[str, str, list[tuple[Trial, Trial]]]]:
    """Each row and what it is compared with, and their runs of the same seed."""
    rows = _by_row(trials)
    for against in BASELINES:
        for row, own in rows.items():
            if row != against and against in rows:
                yield row, against, [(a, b) for a in own for b in rows[against] if a.seed == b.seed]


def _both(pair: tuple[Trial, Trial], sentences: SentencesOf) -> tuple[Sentences, ...]:
    return tuple(best_of(trial, sentences(trial.data, trial.row, trial.seed)) for trial in pair)


def bridge_table(trials: Sequence[Trial]) -> str:
    """Gap of the tightest bound above annealed importance sampling, a row for each run that has it."""
    rows = []
    for trial in trials:
        if trial.bridge_gap is not None:
            error = "" if trial.bridge_gap_error is None else f" ± {trial.bridge_gap_error:.2f}"
            rows.append([trial.row, str(trial.seed), str(trial.bridge_sentences), f"{trial.bridge_gap:+.2f}{error}"])
    return table(["row", "seed", "sentences", "best bound minus bridge, nats a sentence"], rows)


class Sentences(NamedTuple):
    """The tightest bound of each sentence in nats, and its scored tokens."""

    nats: np.ndarray
    words: np.ndarray


def best_of(trial: Trial, path: Path) -> Sentences:
    """Read the bound that ``ppl_best`` is of, sentence by sentence."""
    assert trial.proposal is not None
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Sentences(*(np.array([float(row[name]) for row in rows]) for name in (trial.proposal, "words")))


COLUMNS = ("words", "exact", "q", "prior", "mixture", "refitted")
"""Columns of a file of sentences; the cells of bounds that a row does not have are empty."""


def write_sentences(trials: Sequence[Trial], sentences: SentencesOf, out: Path) -> None:
    """Write every bound of every sentence of all runs into one file, so that each paired difference can be redone."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["data", "row", "seed", *COLUMNS])
        for trial in trials:
            with sentences(trial.data, trial.row, trial.seed).open(newline="") as own:
                for row in csv.DictReader(own):
                    writer.writerow([trial.data, trial.row, trial.seed, *(row.get(name, "") for name in COLUMNS)])


class Difference(NamedTuple):
    """The first minus the second of each pair, nats a sentence.

    Attributes:
        nats: mean over sentences and seeds.
        error: standard error over sentences of the mean over seeds, as if each were one of its own.
        by_length: the same with the sentences of one length counted together, since long ones differ by more; None
            where all have one length.
        deviation: standard deviation over seeds; None for one seed.
        ratio: exp of the difference a scored token: how many times the second's perplexity the first's is.
    """

    nats: float
    error: float
    by_length: float | None
    deviation: float | None
    ratio: float

    def cells(self) -> list[str]:
        """The cells of `ERRORS`."""
        return [f"{self.nats:+.2f}", f"{self.error:.2f}", _format(self.by_length, 2)]


def paired_difference(pairs: Sequence[tuple[Sentences, ...]]) -> Difference:
    """Compare pairs of models, one for each seed, on the same sentences.

    Raises:
        SystemExit: the sentences are not the same.
    """
    words = pairs[0][0].words
    if any(len(each.words) != len(words) or (each.words != words).any() for pair in pairs for each in pair):
        raise SystemExit("the runs were measured on other sentences: remove their study.json and measure them again")
    differences = np.array([first.nats - second.nats for first, second in pairs])
    mean = differences.mean(0)
    error = float(mean.std(ddof=1) / len(mean) ** 0.5)
    groups = {str(length): mean[words == length].tolist() for length in np.unique(words)}
    by_length = clustered_error(groups) if len(groups) > 1 else None
    deviation = mean_and_sd(differences.mean(1).tolist())[1]
    return Difference(float(mean.mean()), error, by_length, deviation, float(np.exp(mean.sum() / words.sum())))


def _by_row(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    return {row: [t for t in trials if t.row == row] for row in dict.fromkeys(trial.row for trial in trials)}


def _mean(trials: Sequence[Trial], name: str) -> str:
    values = [value for trial in trials if (value := getattr(trial, name)) is not None]
    return _format(float(np.mean(values)) if values else None)


def _format(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
