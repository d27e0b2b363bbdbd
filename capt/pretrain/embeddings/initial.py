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

    def fill(self, tables: EmbeddingTables, index: Mapping[str, int], context: ContextInit) -> int:
        """Overwrite the rows of the words that have a vector; the others keep the numbers that they have.

        Each rank fills its own rows, without a word to the others.

        Args:
            tables: of any number of ranks; ``context`` = ``random`` expects them made with ``random_context``.
            index: the row of each word of the text.
            context: where the source has no context table: ``zeros``, a copy of the input vectors, or what is there.

        Returns:
            how many words of the text have a vector.

        Raises:
            DataError: none has.
        """
        start, end = tables.exchange.start, tables.exchange.end
        inputs, contexts = (table.detach().numpy() for table in (tables.input, tables.context))
        known = 0
        for word, vector, own_context in self._rows():
            row = index.get(word)
            if row is None:
                continue
            # Counted on every rank, whichever rank holds the row: either all of them raise below or none.
            known += 1
            if not start <= row < end:
                continue
            inputs[row - start] = vector
            if own_context is None and context == "copy":
                own_context = vector
            if own_context is not None:
                contexts[row - start] = own_context
        if not known:
            raise DataError(
                f"model.init {self.source}: none of its words is among the {len(index):,} of the text; "
                "is it another language, or are its words in upper case (data.lowercase=false)?"
            )
        return known


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
        index: the row of each word of the text.
        initial: the vectors of ``model.init``, where the job has it.
        name: of the module.
        random_context: without ``initial`` the context table starts random as well, not at zero.

    Raises:
        DataError: as `InitialVectors.fill`.
    """
    model = job.model
    random = random_context if initial is None else model.context_init == "random"
    tables = EmbeddingTables(len(index), model.dim, job.run.seed, name, random_context=random)
    if initial is not None and not tables.input.is_meta:
        known = initial.fill(tables, index, model.context_init)
        logger.info("%s: %d of the text's %d words start from model.init %s", name, known, len(index), initial.source)
    return tables
