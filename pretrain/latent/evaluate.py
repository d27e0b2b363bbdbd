"""The paper's columns and the valid ones, of a trained model on held-out text (or on its clusters)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pretrain.base.errors import ConfigError, DataError
from pretrain.base.progress import ProgressCallback
from pretrain.engine import distributed
from pretrain.engine.artifacts import keep, write_result
from pretrain.latent.artifacts import EVALUATION
from pretrain.latent.data.batches import Batch, Batches
from pretrain.latent.data.corpus import load_sentences
from pretrain.latent.evaluation.clusters import cluster_figures
from pretrain.latent.evaluation.forward_reverse import Estimator
from pretrain.latent.evaluation.generated import generated_perplexities, writes_text
from pretrain.latent.evaluation.measure import measure
from pretrain.latent.ngram.kenlm import find_programs
from pretrain.latent.restore import Restored, load_model

AGGREGATE = 10_000
"""Sentences over which the aggregate posterior is taken."""

ROWS = {
    "nelbo_dual": "-ELBO from the dual: the paper's column, a bound on no side",
    "ppl_dual": "PPL from the dual: the paper's column, a bound on no side",
    "nelbo_exact": "-ELBO with the exact KL: an upper bound on -log p(x)",
    "ppl_exact": "PPL with the exact KL: an upper bound",
    "kl_dual": "KL, dual estimate (below 0 it would say that f has not converged)",
    "kl_dual_clamped": "KL, dual estimate, never below that of f = 0",
    "kl_exact": "KL, exact",
    "mi_dual": "MI as the paper: difference of two lower bounds",
    "mi_batch": "MI within batches (at most the log of the batch)",
    "mi_aggregate": "MI with the aggregate posterior",
    "au": "active units, by the exact mean (of draws for an mlp posterior)",
    "au_sampled": "active units, by the mean of the draws: the released rule",
    "rec": "reconstruction, nats a sentence",
    "ppl_rec": "PPL of the reconstruction alone: no bound but for a language model, whose perplexity it is",
    "kl_aggregate_dual": "KL of the aggregate posterior, dual estimate with g",
    "nll_iw": "-log p(x) by importance weighting: an upper bound, on average",
    "ppl_iw": "PPL by importance weighting: an upper bound, on average",
    "iw_sentences": "sentences of the importance weighting",
    "nelbo_exact_there": "-ELBO with the exact KL, of these sentences",
    "ppl_exact_there": "PPL with the exact KL, of these sentences",
    "forward_ppl": "5-gram PPL of generated sentences, under a model of the training text",
    "reverse_train_ppl": "5-gram PPL of the training text, under a model of generated sentences: the released rule",
    "reverse_test_ppl": "5-gram PPL of the test text, under a model of generated sentences: the paper's words",
    "loss": "reconstruction, nats",
    "accuracy": "share of codes that the decoder gives back as their class",
    "purity": "of k-means clusters of the codes",
    "purity_cosine": "of k-means clusters of the codes' directions",
    "silhouette": "of the classes in the space of codes",
    "probe": "accuracy of a linear classifier of codes",
}


def evaluate(
    path: Path | Restored, *, split: str = "test", data: Path | None = None, samples: int = 128, weighted: int = 500,
    limit: int | None = None, weighted_limit: int | None = None, generated: Estimator | None = None,
    out: Path | None = None, progress: ProgressCallback | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a checkpoint on a split of its data.

    Args:
        path: a checkpoint, a run (its best checkpoint, by validation, where it kept one), or a model that is loaded.
        split: ``test``, ``validation`` or ``train``.
        data: folder to read the split from; else where the job read it.
        samples: draws of each posterior; the paper's 128. A Gaussian VAE of the paper's tables was given 1.
        weighted: draws for the importance-weighted likelihood; 0 = none.
        limit: sentences, at most, evenly over all lengths; None = all.
        weighted_limit: the same for the importance-weighted likelihood alone, which decodes each sentence ``weighted``
            times; ``iw_sentences`` says how many there were, and ``ppl_exact_there`` is the bound on these.
        generated: the program whose 5-gram models give forward and reverse perplexity of generated text; None = none.
        out: file to write the result to as well. Where a run's whole own text was measured, the run folder keeps it
            too, for reports.
        progress: told how many batches are done, and of how many.

    Raises:
        CheckpointError, DataError: no such checkpoint; no such text, or text without a known word.
        ConfigError: no draws; or KenLM's programs are not found.
    """
    if samples < 1 or weighted < 0:
        raise ConfigError(f"samples must be 1 or more and weighted 0 or more, got {samples} and {weighted}")
    model = path if isinstance(path, Restored) else load_model(path)
    device = distributed.device()
    for module in model.modules.values():
        module.to(device)
    begin = time.monotonic()
    result: dict[str, Any] = {"checkpoint": str(model.checkpoint)}
    if model.vocabulary is None:
        result |= cluster_figures(model.job, model.modules, device)
    else:
        if generated == "kenlm":
            find_programs()  # rather than after all the measuring
        section = model.job.data.read_from(data)
        sentences = load_sentences(section, split, model.vocabulary)
        if sentences is None:
            raise DataError(f"{section.path}: no file whose name says {split}")
        batches = Batches(sentences, model.job.batch.global_, 0)
        chosen = list(batches.evaluation(limit or len(sentences), 0, 1))
        few = [] if weighted_limit is None or not weighted else list(batches.evaluation(weighted_limit, 0, 1))
        watched = _watched([*chosen, *few], progress)
        figures = measure(
            model.job, model.text[0], islice(watched, len(chosen)), samples, 0 if few else weighted, AGGREGATE, device
        )
        if few:
            part = measure(model.job, model.text[0], watched, min(samples, weighted), weighted, 0, device)
            if found := {name: value for name, value in part.items() if "_iw" in name}:
                figures |= found | {"iw_sentences": part["sentences"]}
                figures |= {f"{name}_there": part[name] for name in ("nelbo_exact", "ppl_exact") if name in part}
        if progress is not None:
            progress(len(chosen) + len(few), len(chosen) + len(few))
        result |= {"split": split, "samples": samples} | figures
        if generated is not None:
            result |= generated_perplexities(model.checkpoint, by=generated, data=data, model=model)
    result["seconds"] = round(time.monotonic() - begin, 1)
    if model.vocabulary is not None and data is None and limit is None:
        keep(model.checkpoint, EVALUATION.format(split=split), result)
    if out is not None:
        write_result(out, result)
    return result


def command(
    checkpoint: Path, *, split: str = "test", data: Path | None = None, draws: int = 128, weighted: int = 500,
    weighted_sentences: int | None = None, generated: str | None = None, out: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`evaluate` as ``capt evaluate`` calls it: its options, and the test text generated from unless told otherwise."""
    split = {"valid": "validation", "dev": "validation"}.get(split, split)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"--split {split!r}: choose train, validation or test")
    if generated not in (None, "builtin", "kenlm", "none"):
        raise ConfigError(f"--generated {generated!r}: choose builtin, kenlm or none")
    model = load_model(checkpoint)
    if generated is None and data is None and split == "test" and writes_text(model.job):
        generated = "builtin"
    return evaluate(
        model, split=split, data=data, samples=draws, weighted=weighted, weighted_limit=weighted_sentences,
        generated=None if generated == "none" else generated, out=out, progress=progress,  # type: ignore[arg-type]
    )  # fmt: skip


def _watched(batches: list[tuple[int, Batch]], progress: ProgressCallback | None) -> Iterator[tuple[int, Batch]]:
    for done, batch in enumerate(batches):
        if progress is not None:
            progress(done, len(batches))
        yield batch


def as_text(result: dict[str, Any]) -> str:
    """A line a figure, saying what bounds what."""
    lines = [f"{result['checkpoint']}"]
    for name, value in result.items():
        if isinstance(value, float):
            meaning = ROWS.get(name, ROWS.get(name.rstrip("0123456789"), ""))
            if name.endswith("_with_ends"):
                meaning = "the same with the ends of sentences scored"
            lines.append(f"  {name:<27} {value:>12.4f}   {meaning}".rstrip())
    return "\n".join(lines)
