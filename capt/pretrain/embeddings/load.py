"""Loading word vectors: of a run, of a checkpoint, or of a vector file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float32

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.embeddings.vectors import WordVectors, read_vectors

DISCRIMINATOR, GENERATOR = "discriminator", "generator"
"""The modules of a checkpoint; each has the parameters ``input`` and ``context`` of shape (V, d)."""


def load_embeddings(path: Path) -> WordVectors:
    """Load the vectors of a vector file, of a checkpoint, or of a run's best checkpoint (else its newest).

    A run's vectors are the discriminator's input table, as in the paper; ``context`` is its other table.

    Raises:
        DataError: a vector file is missing or damaged (`read_vectors`).
        CheckpointError: there is no checkpoint, or it is damaged or of another task.
    """
    return load_tables(path, DISCRIMINATOR) if path.is_dir() else read_vectors(path)


def load_tables(path: Path, module: str) -> WordVectors:
    """Load both tables of a module of a checkpoint or run, verified: ``matrix`` is its input table.

    Raises:
        CheckpointError: as `load_embeddings`; the checkpoint has no such module, or its tables are not of the size of
            its vocabulary.
    """
    from capt.pretrain.embeddings.config import EmbeddingJob
    from capt.pretrain.embeddings.corpus import VOCABULARY, WordVocabulary
    from capt.pretrain.engine.checkpoint import find_best, open_checkpoint, read_manifest, read_weights

    checkpoint = find_best(path)
    open_checkpoint(checkpoint, EmbeddingJob, "ace")
    if module not in read_manifest(checkpoint).modules:
        hint = ": it was trained with negatives.sampler=noise" if module == GENERATOR else ""
        raise CheckpointError(f"{checkpoint}: has no module {module!r}{hint}")
    vocabulary = WordVocabulary.load(checkpoint / VOCABULARY)
    # A generator draws words of the text, so it has no rows of the others.
    words = vocabulary.words[: vocabulary.words_of_text] if module == GENERATOR else vocabulary.words
    weights = read_weights(checkpoint, module)
    tables: list[Float32[np.ndarray, "V d"]] = []
    for name in ("input", "context"):
        if name not in weights or weights[name].ndim != 2 or len(weights[name]) != len(words):
            raise CheckpointError(
                f"{checkpoint}: {module}.{name} is not a table of the {len(words):,} words of {VOCABULARY}"
            )
        tables.append(weights[name].numpy())
    return WordVectors(words, *tables)
