"""Forward and reverse perplexity of what a trained model writes (Table 4)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pretrain.base.errors import DataError
from pretrain.engine.artifacts import save_artifact
from pretrain.latent.artifacts import GENERATED_TEXT
from pretrain.latent.config import LatentJob
from pretrain.latent.data.corpus import file_of, read
from pretrain.latent.evaluation.forward_reverse import (
    SAMPLES,
    Estimator,
    estimator,
    forward_perplexity,
    reverse_perplexity,
)
from pretrain.latent.evaluation.generate import sample
from pretrain.latent.ngram.kenlm import find_programs
from pretrain.latent.restore import Restored, load_model


def writes_text(job: LatentJob) -> bool:
    """Whether a model of this job draws sentences from a prior: neither clusters nor a language model."""
    return job.data.clusters is None and job.model.posterior != "none"


def generated_perplexities(
    path: Path, *, by: Estimator = "builtin", data: Path | None = None, programs: Path | None = None,
    number: int = SAMPLES, seed: int = 1, model: Restored | None = None,
) -> dict[str, float]:  # fmt: skip
    """5-gram perplexities of ``number`` greedy sentences of the prior, with and without ``</s>`` counted.

    ``forward``: of the sentences, under a model of the training text. ``reverse_train`` (the released rule) and
    ``reverse_test`` (the paper's words): of the real texts, under a model of the sentences.

    Args:
        path: a checkpoint or a run.
        by: which program estimates the 5-gram models; the other one is never used instead.
        data: folder with the texts; else where the job read them.
        programs: the folder of KenLM's programs.
        number: sentences.
        seed: of the draws.
        model: what ``path`` holds, where it is loaded already.

    Raises:
        DataError: a text is missing.
        ConfigError: KenLM's programs are not found, or the model has no z.
    """
    if by == "kenlm":
        find_programs(programs)  # rather than after a minute of writing
    model = model or load_model(path)
    _, vocabulary = model.text
    section = model.job.data.read_from(data)
    texts = {}
    for split in ("train", "test"):
        file = file_of(section, split)
        if file is None:
            raise DataError(f"{section.path}: no file whose name says {split}")
        texts[split] = list(read(file, section.format))
        if not vocabulary.knows_any(texts[split]):
            raise DataError(f"{file}: holds no known word; the vocabulary of {len(vocabulary)} words is of other text")
    sentences = [text.split() for text in sample(model, number, seed)]
    with tempfile.TemporaryDirectory() as folder:
        estimate = estimator(by, Path(folder), programs)
        found = {"forward": forward_perplexity(sentences, texts["train"], estimate)}
        reverse = reverse_perplexity(sentences, vocabulary.words, texts, estimate)
    found |= {f"reverse_{name}": value for name, value in reverse.items()}
    figures: dict[str, float] = {}
    for name, value in found.items():
        figures |= {f"{name}_ppl": value.released, f"{name}_ppl_with_ends": value.with_ends}
    if data is None:
        about = {"checkpoint": str(model.checkpoint), "by": by, "number": number, "seed": seed}
        save_artifact(path, GENERATED_TEXT, about | figures)
    return figures
