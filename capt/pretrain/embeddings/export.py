"""``capt convert`` of word embeddings: one file of vectors that word2vec, GloVe or gensim can read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.convert.card import About
from capt.pretrain.embeddings.load import load_embeddings
from capt.pretrain.embeddings.vectors import Form, write_vectors

logger = logging.getLogger(__name__)

TARGETS = ("word2vec", "glove", "gensim")


def require_free(out: Path, *, overwrite: bool) -> None:
    """Raise ``CheckpointError`` unless ``out`` can become a file: it is free, or a file that may be replaced."""
    if out.is_dir():
        raise CheckpointError(f"{out}: a folder; word vectors are one file, such as {out / 'vectors.txt'}")
    if out.exists() and not out.is_file():
        raise CheckpointError(f"{out}: not a regular file; give another name")
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise CheckpointError(f"{out}: exists; give another name, or --overwrite to replace it")


def command(
    checkpoint: Path,
    out: Path,
    *,
    to: str,
    binary: bool | None = None,
    overwrite: bool = False,
    about: About | None = None,
) -> Path:
    """Write the vectors of a run, a checkpoint or a vector file as the file ``out`` and return it.

    ``word2vec`` and ``gensim`` have a header and a binary form; `gensim.models.KeyedVectors.load_word2vec_format` reads
    both, with ``binary=True`` the binary one. ``glove`` is text without a header. A name in ``.gz`` packs the file.

    Args:
        checkpoint: a run, a checkpoint, or a file of vectors.
        out: the file to write.
        to: one of `TARGETS`.
        binary: little-endian float32 instead of text; None means by the name: ``.bin``, ``.bin.gz``.
        overwrite: replace ``out`` if it is a file.
        about: a file of vectors has no model card: nothing of it is written.

    Raises:
        UserError: an argument, the checkpoint or ``out`` is wrong.
    """
    require_free(out, overwrite=overwrite)
    if about is not None and about != About():
        raise ConfigError(f"--to {to} writes a file without a model card: it takes no --push, --license and the like")
    if binary is None:
        binary = out.name.removesuffix(".gz").endswith(".bin")
    vectors = load_embeddings(checkpoint)
    write_vectors(vectors, out, cast(Form, to), binary=binary)
    logger.info("%s: %d words of %d dimensions written from %s", out, len(vectors), vectors.width, checkpoint)
    return out
