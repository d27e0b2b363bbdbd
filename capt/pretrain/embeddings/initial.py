"""Fine-tuning: tables that start from the vectors of a file, a run or a checkpoint (``model.init``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.embeddings.config import EmbeddingJob
from capt.pretrain.embeddings.load import load_embeddings
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.embeddings.vectors import find_layout, stream_vectors

logger = logging.getLogger(__name__)

ContextInit = Literal["zeros", "copy", "random"]
_Vector = Float32[np.ndarray, " d"]


class InitialVectors:
    """The vectors that ``model.init`` names. A file is read word by word, so that it may be larger than memory.

    Args:
        source: a file of vectors, a run folder or a checkpoint.

    Raises:
        DataError: there is nothing at ``source``, or it is not a file of vectors.
        CheckpointError: it is a folder, but neither a run nor a checkpoint of embeddings.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._stored = load_embeddings(source) if source.is_dir() else None
        self.width = find_layout(source).width if self._stored is None else self._stored.width

    def _rows(self) -> Iterator[tuple[str, _Vector, _Vector | None]]:
        if self._stored is None:
            yield from ((word, vector, None) for word, vector in stream_vectors(self.source))
            return
        context = self._stored.context
        for row, word in enumerate(self._stored.words):
            yield word, self._stored.matrix[row], None if context is None else context[row]

    def words_beside(self, index: Mapping[str, int], *, keep: bool) -> list[str]:
        """Return the words that the text lacks, in the order of the source; none without ``keep``. Logs how many.

        Args:
            index: the words of the text.
            keep: they are to stay (``model.other_words``).

        Raises:
            DataError: none of the source's words is of the text.
        """
        words = [word for word, *_ in self._rows()]
        others = [word for word in words if word not in index]
        known = len(words) - len(others)
        if not known:
            raise DataError(
                f"model.init {self.source}: none of its words is among the {len(index):,} of the text; "
                "is it another language, or are its words in upper case (data.lowercase=false)?"
            )
        # A line of the vocabulary's file ends at \n, and a byte order mark at its start is no part of it.
        kept = [word for word in others if "\n" not in word and not word.startswith("\ufeff")] if keep else []
        logger.info(
            "%d of the text's %d words start from model.init %s; of its %d words that are not in the text "
            "%d keep their vectors, untrained, and %d are left out",
            known, len(index), self.source, len(others), len(kept), len(others) - len(kept),
        )  # fmt: skip
        return kept

    def fill(self, tables: EmbeddingTables, index: Mapping[str, int], context: ContextInit) -> None:
        """Overwrite the rows of the words that have a vector; the others keep the numbers that they have.

        Each rank fills its own rows, without a word to the others.

        Args:
            tables: of any number of ranks; ``context`` = ``random`` expects them made with ``random_context``.
            index: the row of each word of the tables.
            context: where the source has no context table: ``zeros``, a copy of the input vectors, or what is there.
        """
        start, end = tables.exchange.start, tables.exchange.end
        inputs, contexts = (table.detach().numpy() for table in (tables.input, tables.context))
        for word, vector, own_context in self._rows():
            row = index.get(word)
            if row is None or not start <= row < end:
                continue
            inputs[row - start] = vector
            if own_context is None and context == "copy":
                own_context = vector
            if own_context is not None:
                contexts[row - start] = own_context


def with_initial_width(job: EmbeddingJob, initial: InitialVectors) -> EmbeddingJob:
    """The job with the width of the vectors that it starts from, which it may have left out.

    Raises:
        ConfigError: it asks for another width.
    """
    dim, width = job.model.dim, initial.width
    if dim == width:
        return job
    if "dim" in job.model.model_fields_set:
        raise ConfigError(
            f"model.dim {dim}: the vectors of {initial.source} have {width} numbers; "
            f"leave model.dim out, or set model.dim={width}"
        )
    return job.model_copy(update={"model": job.model.model_copy(update={"dim": width})})


def build_tables(
    job: EmbeddingJob,
    index: Mapping[str, int],
    initial: InitialVectors | None = None,
    name: str = "discriminator",
    *,
    random_context: bool = False,
) -> EmbeddingTables:
    """The tables of a module, from the seed and, where the job names vectors, from these.

    Each rank makes its own rows, without a word to the others.

    Args:
        job: seed and width.
        index: the row of each word.
        initial: the vectors of ``model.init``, where the job has it.
        name: of the module.
        random_context: without ``initial`` the context table starts random as well, not at zero.
    """
    model = job.model
    random = random_context if initial is None else model.context_init == "random"
    tables = EmbeddingTables(len(index), model.dim, job.run.seed, name, random_context=random)
    if initial is not None and not tables.input.is_meta:
        initial.fill(tables, index, model.context_init)
    return tables
