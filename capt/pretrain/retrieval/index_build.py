"""Building a search index: documents are read, cut into passages and encoded; what has not changed stays."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Int

from capt.pretrain.base.arrays import Column, map_array
from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import DataError, how_to_install
from capt.pretrain.base.files import write_json
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.parallel import ProgressCallback, batched
from capt.pretrain.base.verification import sha256
from capt.pretrain.data.formats import TextFile
from capt.pretrain.retrieval.bm25 import Bm25Index, require_bm25
from capt.pretrain.retrieval.encode import embed, stored_vectors
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.graph import GRAPH_FROM, VectorGraph, has_faiss, require_faiss
from capt.pretrain.retrieval.index_files import (
    ABOUT,
    DOCUMENTS,
    GRAPH,
    LOCK,
    PASSAGES,
    STORE,
    VECTORS,
    WORDS,
    Generation,
    PassageWriter,
    SearchRecord,
    read_search_record,
    rows_of_file,
)
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions
from capt.pretrain.retrieval.passages import PassageCutter, Passages
from capt.pretrain.retrieval.search import BLOCK, by_id, unit_rows
from capt.pretrain.retrieval.sources import SourceDocument, SourceOptions, find_sources, read_sources
from capt.pretrain.retrieval.store import DType, Vectors

logger = logging.getLogger(__name__)

_WINDOW = 1024
"""Documents that are cut together."""
_PREFIX = "generation-"


@dataclass(frozen=True)
class BuildOptions:
    """Options of an index.

    Attributes:
        encoder: pooling, length and prompts, where they are not the model's own; the length is that of a passage.
        sources: how documents are read.
        dtype: of stored vectors.
        tokens: see `EncodeOptions`.
        overlap: tokens that a passage has in common with the one before it; None = an eighth of a passage.
        approximate: whether vectors are searched by a graph, and not all of them; None = from a million on, where faiss
            is installed.
    """

    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    sources: SourceOptions = field(default_factory=SourceOptions)
    dtype: DType = "fp32"
    tokens: int | None = None
    overlap: int | None = None
    approximate: bool | None = None


@dataclass(frozen=True)
class BuildReport:
    """Counts of what a build has found, and has done: documents and passages of the index, changes, texts encoded."""

    documents: int
    passages: int
    added: int
    changed: int
    removed: int
    encoded: int


def build_index(
    documents: Sequence[str | Path],
    model: Path | str,
    out: Path | str,
    options: BuildOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> BuildReport:
    """Build the index ``out`` of ``documents``, or bring it up to date: it then holds these documents and no others.

    Only what is new is cut and encoded: documents are known by their ids and the hashes of their texts. A build that
    was killed is continued by the same call, and the index answers as before until the new one is complete.

    Args:
        documents: files, folders, patterns and addresses in a store; see `find_sources`.
        model: see `load_text_encoder`.
        out: folder of the index, new or built before.
        options: how documents are read, cut and encoded.
        progress: called with passages encoded.

    Raises:
        DataError: a document cannot be read, there is none, or ``out`` is something else than an index.
        CheckpointError: as `load_text_encoder`.
        ConfigError: an option that the model does not have, or another build is at work.
    """
    out, model, options = Path(out), Path(model), options or BuildOptions()
    _require_index(out)
    # What is not installed is said before hours of encoding.
    require_bm25()
    if options.approximate:
        require_faiss()
    files = find_sources([str(each) for each in documents], out.resolve())
    encoder = load_text_encoder(model, options.encoder)
    encoder.require_vectors("the index keeps vectors")
    cutter = PassageCutter(encoder, options.overlap)
    out.mkdir(parents=True, exist_ok=True)
    with file_lock(out / LOCK, refusal=f"{out}: another capt search build is at work there; wait for its end"):
        return _build(files, model, encoder, cutter, out, options, progress)


def _require_index(out: Path) -> None:
    known = {ABOUT, LOCK, STORE}
    others = [path.name for path in out.iterdir() if path.name not in known] if out.is_dir() else []
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: a file; name a folder for the index")
    if foreign := [name for name in others if not name.lstrip(".").startswith(_PREFIX)]:
        raise DataError(f"{out}: a folder with other files, such as {foreign[0]}; name a new folder for the index")


def _build(
    files: Sequence[TextFile],
    model: Path,
    encoder: TextEncoder,
    cutter: PassageCutter,
    out: Path,
    options: BuildOptions,
    progress: ProgressCallback | None,
) -> BuildReport:
    identity = asdict(encoder.identity("document", options.dtype))
    before = Generation.map(out, read_search_record(out)) if (out / ABOUT).is_file() else None
    earlier = _Earlier(before, cutter, identity)
    number = 1 + max((int(path.name.removeprefix(_PREFIX)) for path in out.glob(f"{_PREFIX}*")), default=0)
    folder = out / f"{_PREFIX}{number:06d}"
    try:
        with new_folder(folder) as partial:
            with PassageWriter(partial) as writer:
                for document, digest, passages in _cut(read_sources(files, options.sources), cutter, earlier):
                    writer.add(document, digest, passages)
            if not writer.names:
                raise DataError(f"no document with a text in {', '.join(map(str, files[:3]))}")
            writer.finish(_order(writer.names, rows_of_file(partial / DOCUMENTS)))
            # Passages of earlier documents are not encoded again, nor tokenized to be sorted by length.
            vectors = EncodeOptions(str(out / STORE), options.dtype, options.tokens)
            texts = earlier.new_texts(
                partial, lambda: stored_vectors(vectors, encoder.identity("document", options.dtype))
            )
            stored = embed(encoder, texts, "document", vectors, progress, earlier.new_passages)
            record = SearchRecord(
                generation=folder.name, model=str(model.absolute() if model.exists() else model),
                encoder=asdict(options.encoder), identity=identity, similarity=encoder.similarity,
                length=cutter.length, overlap=cutter.overlap, documents=len(writer.names), passages=writer.passages,
                fields=sorted(writer.fields),
            )  # fmt: skip
            if before is not None and earlier.is_same(partial) and _wants_graph(options, record) == before.has_graph:
                record = record.model_copy(update={"recall": before.record.recall})
                raise _SameError
            _write_vectors(partial, record, stored)
            if _wants_graph(options, record):
                record = record.model_copy(update={"recall": _write_graph(partial, record)})
            Bm25Index.of(row["text"] for row in rows_of_file(partial / PASSAGES)).save(partial / WORDS)
    except _SameError:  # the folder is not kept, and the earlier one stays; the model may have moved
        assert before is not None
        record, folder = record.model_copy(update={"generation": before.folder.name}), before.folder
    # After the folder: who reads the record finds what it names.
    write_json(out / ABOUT, record.model_dump())
    for other in out.glob(f"{_PREFIX}*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return BuildReport(record.documents, record.passages, *earlier.counts(), stored.added)


class _SameError(Exception):
    """The new files are those that there are."""


class _Earlier:
    """Documents of the index as it was, by which those that stay are known, and the counts of what has changed."""

    def __init__(self, generation: Generation | None, cutter: PassageCutter, identity: Mapping[str, object]) -> None:
        record = None if generation is None else generation.record
        cuts_alike = record is not None and (record.length, record.overlap) == (cutter.length, cutter.overlap)
        self._generation = generation
        self._encodes_alike = cuts_alike and record is not None and record.identity == identity
        self._documents: dict[str, tuple[str, Passages]] = {}
        self._there: set[str] = set()
        self.added = self.changed = self.new_passages = 0
        self._new: list[bool] = []
        for row in generation.documents() if generation is not None else ():
            # Passages that another model would be given are cut anew, by its tokens.
            passages = [(begin, end) for begin, end in row["passages"]] if self._encodes_alike else []
            self._documents[row["id"]] = row["sha256"], passages

    def passages_of(self, name: str, digest: str) -> Passages:
        """The passages of a document that is as it was; none of another."""
        known, passages = self._documents.get(name, ("", []))
        self.added += not known
        self.changed += bool(known) and known != digest
        self._there.add(name)
        return passages if known == digest else []

    def take(self, passages: Passages, *, is_new: bool) -> None:
        """Note the passages of the next document."""
        self._new.append(is_new)
        self.new_passages += len(passages) * is_new

    def counts(self) -> tuple[int, int, int]:
        """Documents added, changed and removed."""
        return self.added, self.changed, len(self._documents.keys() - self._there)

    def new_texts(self, folder: Path, stored: Callable[[], Vectors]) -> Iterator[str]:
        """Yield the texts of the passages of documents that were not there, and of others that ``stored`` has lost."""
        # Opened with the first text: what is damaged has been forgotten by then.
        rows, there = rows_of_file(folder / PASSAGES), stored()
        for document, is_new in zip(rows_of_file(folder / DOCUMENTS), self._new, strict=True):
            for row in islice(rows, len(document["passages"])):
                if is_new or text_hash(row["text"]) not in there:
                    yield row["text"]

    def is_same(self, folder: Path) -> bool:
        """Return whether the files in ``folder`` are those of the earlier generation."""
        assert self._generation is not None
        names = (DOCUMENTS, PASSAGES)
        return self._encodes_alike and all(
            sha256(folder / name) == sha256(self._generation.folder / name) for name in names
        )


def _cut(
    documents: Iterator[SourceDocument], cutter: PassageCutter, earlier: _Earlier
) -> Iterator[tuple[SourceDocument, str, Passages]]:
    """Yield the documents with the hashes of their texts and their passages."""
    for window in batched(documents, _WINDOW):
        digests = [hashlib.sha256(each.text.encode("utf-8", "surrogatepass")).hexdigest() for each in window]
        known = [earlier.passages_of(each.name, digest) for each, digest in zip(window, digests, strict=True)]
        new = iter(cutter.passages_of([each.text for each, there in zip(window, known, strict=True) if not there]))
        for document, digest, there in zip(window, digests, known, strict=True):
            passages = there or next(new)
            earlier.take(passages, is_new=not there)
            yield document, digest, passages


def _order(names: Sequence[str], documents: Iterable[Mapping[str, object]]) -> Int[np.ndarray, " n"]:
    """The place of each passage among equal scores: ids in descending order, passages of a document as they come."""
    counts = np.array([len(row["passages"]) for row in documents])  # type: ignore[arg-type]
    places = np.repeat(by_id(names), counts)
    order = np.empty(len(places), dtype=np.int64)
    order[np.argsort(places, kind="stable")] = np.arange(len(places))
    return order


def _write_vectors(folder: Path, record: SearchRecord, stored: Vectors) -> None:
    """Write the vectors of all passages as one array, of length 1 where cosines are compared."""
    layout = record.vectors
    column = Column(folder / VECTORS, layout.dtype, layout.shape[1:], has_header=True)
    texts = (row["text"] for row in rows_of_file(folder / PASSAGES))
    for block in batched(map(text_hash, texts), BLOCK):
        rows = stored.vectors(block)
        column.append(unit_rows(rows) if record.similarity == "cosine" else rows)
    column.finish()


def _wants_graph(options: BuildOptions, record: SearchRecord) -> bool:
    if options.approximate is not None or record.passages < GRAPH_FROM:
        return bool(options.approximate)
    if not has_faiss():
        logger.warning(
            "%s passages, all of which every question is compared with; %s, and the same command, for an approximate "
            "search", f"{record.passages:,}", how_to_install("ann"),
        )  # fmt: skip
    return has_faiss()


def _write_graph(folder: Path, record: SearchRecord) -> float:
    """Write the graph of the vectors in ``folder``; returns its recall."""
    vectors = map_array(folder / VECTORS, record.vectors)
    graph = VectorGraph.of(vectors)
    graph.save(folder / GRAPH)
    recall = graph.recall(vectors)
    logger.info("approximate search: it finds %.1f%% of the 10 nearest passages of an exact one", 100 * recall)
    return recall
