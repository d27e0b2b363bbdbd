"""A teacher's vectors in a job of pairs: opened before the sources are read, and found for each of their texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, counted
from capt.pretrain.base.files import write_text
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.verification import Verifier, digest_of
from capt.pretrain.engine.task import Role
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.forms import Pair
from capt.pretrain.pairs.prepare import pairs_of
from capt.pretrain.pairs.representations import module_of
from capt.pretrain.pairs.sources import EncodedTexts, Side, SourceRows
from capt.pretrain.registry import teacher_vectors

logger = logging.getLogger(__name__)


def with_teacher(job: PairJob, encoder: Any, verifier: Verifier) -> tuple[PairJob, Any]:
    """Open the teacher's vectors, and fill in what they say of it and a projection into the export.

    Args:
        job: the job.
        encoder: of the student, which decides the width of its vectors.
        verifier: of the files of vectors.

    Returns:
        The job, and the vectors (`capt.pretrain.retrieval.teacher.TeacherVectors`); None where it names none.

    Raises:
        CheckpointError: a resumed job names vectors of another width than it began with.
        ConfigError: a width that the job cannot train with.
    """
    section, width = job.distillation, module_of(job).width_of(job, encoder)
    if section.vectors is None:
        return job, None
    teacher = teacher_vectors(section, verifier)
    facts = teacher.facts()
    if section.teacher is not None and section.teacher["dimension"] != teacher.dimension:
        raise CheckpointError(
            f"distillation.vectors: {teacher.dimension} dimensions, where the job began with "
            f"{section.teacher['dimension']}: name the vectors that it began with"
        )
    update: dict[str, Any] = {"distillation": section.model_copy(update={"teacher": facts})}
    if section.projection == "export" and width != teacher.dimension:
        if job.model.projection is not None:
            raise ConfigError(
                f"distillation.projection=export makes vectors of the teacher's {teacher.dimension} columns: leave "
                f"model.projection={width} out"
            )
        update["model"] = job.model.model_copy(update={"projection": teacher.dimension})
    job = job.model_copy(update=update)
    width = module_of(job).width_of(job, encoder)
    if job.distillation.projected_width(width) is not None and job.contrast.matryoshka:
        raise ConfigError(
            f"contrast.matryoshka cuts vectors of {width} columns, and a map to the teacher's {teacher.dimension} "
            "is left behind: set distillation.projection=export, or train with distillation.listwise alone"
        )
    return job, teacher


def with_vectors(
    splits: Sequence[SourceRows | None], files: Sequence[Path], teacher: Any, verifier: Verifier
) -> list[SourceRows | None]:
    """Return the rows of ``files`` with the places of their texts' vectors; without a teacher as they are.

    Raises:
        DataError: a text has no vector, or one that is damaged or says nothing.
    """
    if teacher is None:
        return list(splits)
    with verifier.ranks.synchronize_errors():
        placed = [None if pairs is None else _placed(pairs, teacher) for pairs in splits]
        there = [pairs for pairs in placed if pairs is not None]
        _require_vectors(there, files, teacher, verifier.cache)
        for pairs, side, texts in _sides(there):
            assert texts.vectors is not None
            # The ranks look at the vectors together.
            mine = texts.vectors[distributed.rank() :: distributed.world_size()]
            teacher.check(mine, pairs.role_of(side))
    return placed


def vectors_of_texts(teacher: Any, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n e"] | None:
    """The teacher's vectors of texts that are searched; None where a text has none, which is logged."""
    store = teacher.side(role)
    places = store.find(map(text_hash, texts))
    if (missing := int((places < 0).sum())) and distributed.rank() == 0:
        logger.warning(
            "validate.retrieval: %s of %s (%s) have no vector in %s, so that the teacher's own figures are left "
            "out; %s",
            f"{missing:,}", counted(len(texts), "text"), role, teacher.place(role),
            teacher.remedy(Path("FOLDER"), role),
        )  # fmt: skip
    return None if missing else store.at(places)


def _placed(pairs: SourceRows, teacher: Any) -> SourceRows:
    if pairs.is_alone:  # no query: it has the prompt and the length of a document, as the teacher's vector has
        pairs = replace(pairs, queries=pairs.documents, query=pairs.positives.values)
    sides = {}
    for _, side, texts in _sides([pairs]):
        assert texts.hashes is not None, "the rows were written with them"
        sides[side] = replace(texts, vectors=teacher.find(texts.hashes, pairs.role_of(side)))
    return replace(pairs, queries=sides["query"], documents=sides["document"])


def _require_vectors(splits: Sequence[SourceRows], files: Sequence[Path], teacher: Any, cache: Path) -> None:
    """Refuse texts without vectors: write them into a file, and name the command that encodes it."""
    for role in ("document", "query"):
        # Of one kind of vectors both sides are counted together.
        mine = [
            texts for pairs, side, texts in _sides(splits)
            if teacher.side(pairs.role_of(side)) is teacher.side(role)
        ]  # fmt: skip
        missing, total = set(), set()
        for texts in mine:
            assert texts.hashes is not None
            assert texts.vectors is not None
            total |= _hashes(texts.hashes)
            missing |= _hashes(texts.hashes[texts.vectors < 0])
        if not missing:
            continue
        name = digest_of(sorted(each.hex() for each in missing))
        path = cache / "without_vectors" / f"{name}.jsonl"
        # On the host that lacks them, which need not be that of rank 0.
        if distributed.local_rank() == 0:
            _write_texts(path, missing, pairs_of(splits[0].source, files))
        raise DataError(
            f"source {splits[0].source.name}: {len(missing):,} of {counted(len(total), 'text')} have no vector in "
            f"{teacher.place(role)}; {teacher.remedy(path, role)}"
        )


def _sides(rows: Sequence[SourceRows]) -> Iterator[tuple[SourceRows, Side, EncodedTexts]]:
    for pairs in rows:
        yield pairs, "query", pairs.queries
        yield pairs, "document", pairs.documents


def _hashes(values: np.ndarray) -> set[bytes]:
    raw = values.tobytes()
    return {raw[at : at + 16] for at in range(0, len(raw), 32)}


def _write_texts(path: Path, wanted: set[bytes], pairs: Iterable[tuple[str, Pair]]) -> None:
    """Write those of the texts of ``pairs`` that have one of the hashes ``wanted``, each once."""
    found: dict[bytes, str] = {}
    for _, pair in pairs:
        for text in (pair.query, *pair.positives, *pair.negatives):
            if (name := text_hash(text)) in wanted:
                found[name] = text
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in found.values()))
