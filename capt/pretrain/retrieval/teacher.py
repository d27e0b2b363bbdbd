"""A teacher's vectors for training: of a store, by the hash of each text; or of a table or an array, as one.

A job of pairs finds `open_teacher` in `capt.pretrain.registry`, because what encodes texts imports jobs of pairs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError, DataError, counted, quoted, shown
from capt.pretrain.base.files import files_below, read_json, read_lines
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.parallel import batched
from capt.pretrain.base.stores import MissingError, read_small, tree
from capt.pretrain.base.verification import Verifier, digest_of
from capt.pretrain.data.formats import suffix_of, suffixes
from capt.pretrain.data.tables import open_table
from capt.pretrain.engine.task import Role
from capt.pretrain.pairs.cells import DOCUMENT_IDS, id_of, text_of
from capt.pretrain.pairs.distillation_config import PairDistillation
from capt.pretrain.pairs.folders import corpus_texts, text_named
from capt.pretrain.pairs.layout import ROLES
from capt.pretrain.pairs.sources import EncodedTexts
from capt.pretrain.retrieval.bucket import BucketVectors
from capt.pretrain.retrieval.options import CACHE_BYTES
from capt.pretrain.retrieval.store import IDENTITY, VectorIdentity, Vectors, VectorStore

logger = logging.getLogger(__name__)

_COLUMNS = ("vector", "embedding", "vectors", "embeddings", "label", "labels")
_TEXTS = ("text", "sentence", "sentence1", "anchor", "query", "document")
_OF_PAIRS = frozenset(
    name for role in ("query", "positive", "negative") for name in ROLES[role] if not name.endswith(("_id", "_ids"))
)
_AS_GIVEN = "as given"
"""The pooling of the vectors of a file, which says nothing of the model that made them."""
_BATCH = 4096


@dataclass(frozen=True)
class TeacherVectors:
    """The vectors of documents and of texts alone, and those of queries: the same where no others are named."""

    documents: Vectors
    queries: Vectors
    files: Mapping[str, Path] = field(default_factory=dict)
    """The tables or arrays that they were copied from, by role."""

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self.documents.identity.dimension

    @property
    def digest(self) -> str:
        """The keys of both."""
        return digest_of([self.documents.identity.key, self.queries.identity.key])

    def facts(self) -> dict[str, Any]:
        """Return what the keys say of the teacher, for the job and the model card."""
        identity, noted = self.documents.identity, self.documents.noted()
        found = {**asdict(identity), "query_prompt": self.queries.identity.prompt}
        return {"name": Path(str(noted["model"])).name, **found} if "model" in noted else found

    def side(self, role: Role) -> Vectors:
        """The vectors of a role."""
        return self.queries if role == "query" else self.documents

    def find(self, hashes: np.ndarray, role: Role) -> Int64[np.ndarray, " n"]:
        """The places of texts by their hashes (`EncodedTexts.hashes`); -1 where the text has no vector.

        Lines of a file of text are encoded without the spaces around them.
        """
        raw, store = hashes.tobytes(), self.side(role)
        found, stripped = (store.find(raw[at : at + 16] for at in range(start, len(raw), 32)) for start in (0, 16))
        return np.where(found < 0, stripped, found)

    def of(self, texts: EncodedTexts, numbers: Int64[np.ndarray, " n"], role: Role) -> Float[np.ndarray, "n e"]:
        """The vectors of texts whose places are known. Raises ``DataError`` where one is damaged."""
        assert texts.vectors is not None
        return self.side(role).at(texts.vectors[numbers])

    def check(self, places: Int64[np.ndarray, " n"], role: Role) -> None:
        """Raise ``DataError`` where a vector is damaged, or has no direction that could be learnt."""
        store = self.side(role)
        for start in range(0, len(places), _BATCH):
            rows = store.at(places[start : start + _BATCH])
            fault = _fault(rows)
            if fault is not None:
                raise DataError(
                    f"{store.folder}: the vector of a text is {fault[1]}: the teacher or its precision fails"
                )

    def place(self, role: Role) -> Path | str:
        """The file of the vectors of a role that a user has named, or their folder in a store."""
        return self._file(role) or self.side(role).folder

    def remedy(self, texts: Path, role: Role) -> str:
        """Say what adds the vectors of ``texts``, a file, to those of a role."""
        if self._file(role) is not None:
            return f"give it a row with the vector of each text of {texts}"
        return f"add them: {self.command(texts, role)}"

    def _file(self, role: Role) -> Path | None:
        return self.files.get("query" if role == "query" else "document")

    def command(self, texts: Path, role: Role) -> str:
        """The command that adds the vectors of ``texts``, a file, to the store."""
        store = self.side(role)
        noted = store.noted()
        words: list[object] = ["capt", "encode", texts, "--model", noted.get("model", "TEACHER")]
        words += ["--out", str(store.folder).rpartition("/")[0]]
        given = {
            "--role": noted.get("role", "document"), "--pooler": noted.get("pooling"), "--length": noted.get("length"),
            "--query-prompt": noted.get("query_prompt"), "--document-prompt": noted.get("document_prompt"),
        }  # fmt: skip
        defaults: dict[str, Any] = {"--role": "document"}
        for option, value in {**given, "--dtype": store.identity.dtype}.items():
            if value not in (None, defaults.get(option), "fp32"):
                words += [option, value]
        return " ".join(map(quoted, words))


def open_teacher(section: PairDistillation, verifier: Verifier) -> TeacherVectors:
    """The vectors that ``distillation.vectors`` and ``query_vectors`` name. Collective.

    Raises:
        ConfigError: a place has several kinds of vectors, or both have vectors of other widths.
        DataError: there are none, a file is damaged, or hosts have others.
    """
    assert section.vectors is not None
    documents = _open(section.vectors, "distillation.vectors", section, verifier)
    queries = documents
    if section.query_vectors is not None:
        queries = _open(section.query_vectors, "distillation.query_vectors", section, verifier)
    places = {"document": section.vectors, "query": section.query_vectors or section.vectors}
    if section.ids is not None and not any(str(place).lower().endswith(".npy") for place in places.values()):
        raise ConfigError(
            f"distillation.ids names the rows of a .npy file, and distillation.vectors={section.vectors} has its texts "
            "itself: leave it out"
        )
    if section.corpus is not None and section.ids is None:
        raise ConfigError("distillation.corpus has the texts of distillation.ids: set that as well, or leave it out")
    files = {role: place for role, place in places.items() if isinstance(place, Path) and place.is_file()}
    teacher = TeacherVectors(documents, queries, files)
    known = verifier.ranks.gather(teacher.digest)
    with verifier.ranks.synchronize_errors():
        if len(set(known)) > 1:
            raise DataError(
                "distillation.vectors: hosts have vectors of other models, prompts, lengths or types than each other: "
                "copy one store to all hosts"
            )
    if queries.identity.dimension != documents.identity.dimension:
        raise ConfigError(
            f"distillation.query_vectors has {queries.identity.dimension} dimensions, and distillation.vectors "
            f"{documents.identity.dimension}: name vectors of one teacher"
        )
    models = {each.identity.model for each in (documents, queries) if each.identity.pooling != _AS_GIVEN}
    if len(models) > 1:
        raise ConfigError(
            "distillation.query_vectors belongs to another model than distillation.vectors: name one teacher's"
        )
    return teacher


def _open(place: Path | str, key: str, section: PairDistillation, verifier: Verifier) -> Vectors:
    if isinstance(place, Path) and place.is_file():
        return _imported(place, key, section, verifier)
    with verifier.ranks.synchronize_errors():
        found = _kinds(place)
        if not found:
            raise DataError(
                f"{key}={place}: no vectors there; capt encode TEXTS --model TEACHER --out {quoted(place)} makes them"
            )
        if len(found) > 1:
            kinds = ", ".join(f"{root}/{identity.key} ({_described(identity)})" for root, identity in found)
            raise ConfigError(f"{key}={place} has {counted(len(found), 'kind')} of vectors; name one of them: {kinds}")
        ((root, identity),) = found
        if identity.dtype not in ("fp32", "fp16"):
            raise ConfigError(
                f"{key}={place} has vectors in {identity.dtype}: encode the texts with --dtype fp16 or fp32"
            )
        if isinstance(root, str):
            return BucketVectors(root, identity, default_cache(), CACHE_BYTES)
        return VectorStore(root, identity)


def _kinds(place: Path | str) -> list[tuple[Path | str, VectorIdentity]]:
    """The kinds of vectors in a store, each with the root of it: of one of them that alone."""
    if isinstance(place, str):
        place = place.rstrip("/")
        names = [file.url.removeprefix(f"{place}/") for file in tree(place)]
        found = [name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == IDENTITY]
        urls = [f"{place}/{name}" if name else place for name in found]
        return [(url.rpartition("/")[0], _identity(url)) for url in urls]
    folders = [place] if (place / IDENTITY).is_file() else [path.parent for path in sorted(place.glob(f"*/{IDENTITY}"))]
    return [(folder.parent, _identity(folder)) for folder in folders]


def _identity(folder: Path | str) -> VectorIdentity:
    """The identity of a folder of vectors. Raises ``DataError`` where the folder is not named by it."""
    where = f"{folder}/{IDENTITY}"
    try:
        content = json.loads(read_small(where)) if isinstance(folder, str) else read_json(Path(where))
        identity = VectorIdentity(**content)
    except (MissingError, TypeError, ValueError) as error:
        if isinstance(error, DataError) and not isinstance(error, MissingError):
            raise
        raise DataError(f"{where} is none of a store of vectors; capt encode writes one") from None
    if (name := str(folder).rpartition("/")[2]) != identity.key:
        raise DataError(
            f"{folder}: vectors of {identity.key}, by their {IDENTITY}: give the folder that name, not {name}"
        )
    return identity


def _described(identity: VectorIdentity) -> str:
    prompt = f"prompt {shown(identity.prompt)}" if identity.prompt else "no prompt"
    length = f"{identity.length} tokens" if identity.length else "any length"
    return f"model {identity.model[:8]}, {identity.dimension} dimensions, {identity.pooling}, {length}, {prompt}"


# ---- tables and arrays


def _imported(path: Path, key: str, section: PairDistillation, verifier: Verifier) -> VectorStore:
    """The vectors of a file, copied into a store of the cache, by the content of all that is read."""
    suffix = suffix_of(path)
    if suffix == ".npy" and section.ids is None:
        raise ConfigError(f"{key}={path}: an array has no texts: set distillation.ids to the table of its rows")
    if suffix != ".npy" and suffix not in suffixes():
        raise ConfigError(
            f"{key}={path}: a folder of capt encode, a table ({', '.join(suffixes())}) or .npy is expected"
        )
    given = (section.ids, section.corpus) if suffix == ".npy" else ()
    inputs = [path, *(file for each in given if each is not None for file in files_below(each))]
    with verifier.ranks.synchronize_errors():
        if missing := next((each for each in inputs if not each.is_file()), None):
            raise DataError(f"{missing}: no such file")
    content = verifier.digests(inputs)
    name = digest_of([content, section.vector_column, [str(each) for each in given]])
    root = verifier.cache / "teachers" / name

    def write(folder: Path) -> None:
        rows = _of_array(path, section) if suffix == ".npy" else _of_table(path, section.vector_column)
        store: VectorStore | None = None
        known: set[bytes] = set()
        again: list[_Row] = []
        for batch in batched(rows, _BATCH):
            if store is None:
                identity = VectorIdentity(name, "", "", 0, _AS_GIVEN, len(batch[0][2]))
                store = VectorStore(folder, identity)
            for place, _, vector in batch:
                if len(vector) != store.identity.dimension:
                    raise DataError(
                        f"{place}: a vector of {len(vector)} numbers, and the first one has {store.identity.dimension}"
                    )
            vectors = np.stack([vector for _, _, vector in batch])
            if (fault := _fault(vectors)) is not None:
                raise DataError(
                    f"{batch[fault[0]][0]}: the vector is {fault[1]}: leave the row out, or encode it again"
                )
            new: dict[bytes, int] = {}
            for number, row in enumerate(batch):
                if (name_of_text := text_hash(row[1])) in known:
                    again.append(row)
                else:
                    known.add(name_of_text)
                    new[name_of_text] = number
            if new:
                store.add([*new], vectors[[*new.values()]])
            if len(again) >= _BATCH:
                _require_same(store, again)
                again.clear()
        if store is None:
            raise DataError(f"{path}: no row with a vector")
        _require_same(store, again)
        store.close()

    with verifier.ranks.synchronize_errors():
        make_folder_once(root, write)
        ((_, identity),) = _kinds(root)
        return VectorStore(root, identity)


def _fault(rows: Float[np.ndarray, "n d"]) -> tuple[int, str] | None:
    """The first row that is no direction, and what it is."""
    norms = np.linalg.norm(rows, axis=1)
    wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if not len(wrong):
        return None
    return int(wrong[0]), "all zeros" if norms[wrong[0]] == 0 else "not finite"


_Row = tuple[str, str, Float[np.ndarray, " d"]]
_SAME = 0.05
"""Distance of two vectors of one text, as a share of their length, that precision and padding may cause."""


def _require_same(store: VectorStore, again: Sequence[_Row]) -> None:
    """Raise ``DataError`` for a row whose text has another vector in the store: which is meant, nothing says."""
    if not again:
        return
    store.close()
    store.reload()
    before = store.vectors([text_hash(text) for _, text, _ in again])
    for (place, text, vector), first in zip(again, before, strict=True):
        if np.linalg.norm(vector - first) > _SAME * max(np.linalg.norm(vector), np.linalg.norm(first)):
            raise DataError(
                f"{place}: another vector of the text {shown(text, 40)} than in an earlier row: leave one of them out; "
                "those of queries, which a prompt makes others, are named by distillation.query_vectors"
            )


def _of_table(path: Path, column: str | None) -> Iterator[_Row]:
    """The place, the text and the vector of each row of a table."""
    table = open_table(path)
    names = table.columns
    chosen = column or next((name for name in _COLUMNS if name in names), None)
    if chosen is None or chosen not in names:
        has = ", ".join(map(shown, names[:10]))
        raise DataError(f"{path}: no column of vectors among {has}: name it by distillation.vector_column")
    texts = _text_column(path, [name for name in names if name != chosen], "call it text")
    for place, _, row in table.rows:
        yield place, text_of(place, texts, row.get(texts)), _vector(place, chosen, row.get(chosen))


def _text_column(path: Path, names: Sequence[str], remedy: str) -> str:
    """The column of the texts that vectors are of. Raises ``DataError`` for none, or several of which none is text."""
    has = ", ".join(map(shown, names[:10]))
    found = [name for name in _TEXTS if name in names]
    if not found:
        raise DataError(f"{path}: no column of texts among {has}: {remedy}")
    others = [name for name in names if name in _OF_PAIRS and name != found[0]]
    if found[0] != "text" and others:
        raise DataError(
            f"{path}: {' and '.join(map(shown, (found[0], *others)))} are texts, and a vector is of one: call that one "
            "text, and give the vectors of the others a table of their own (distillation.query_vectors)"
        )
    return found[0]


def _vector(place: str, column: str, value: Any) -> Float[np.ndarray, " d"]:
    try:
        given = np.asarray(value)
        with np.errstate(over="ignore"):  # what fp32 cannot hold is named as not finite
            vector = given.astype(np.float32)
    except (TypeError, ValueError):
        given = vector = np.zeros((0, 0), np.float32)
    if vector.ndim != 1 or not len(vector):
        raise DataError(f"{place}: {column!r} holds no list of numbers: {shown(value, 40)}")
    if given.dtype.kind in "iub" and vector.any():
        raise DataError(
            f"{place}: {column!r} holds whole numbers, as vectors in int8 or in bits do, whose directions are others: "
            "floating-point numbers are expected"
        )
    return vector


def _of_array(path: Path, section: PairDistillation) -> Iterator[_Row]:
    """The place, the text and the vector of each row of a ``.npy`` file, with the texts or ids of ``ids``."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: no array that numpy reads: {error}") from None
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise DataError(f"{path}: {rows.dtype} of shape {rows.shape}: rows of floating-point numbers are expected")
    assert section.ids is not None
    named = list(_named(section.ids, by_id=section.corpus is not None))
    if len(named) != len(rows):
        raise DataError(
            f"{section.ids} has {counted(len(named), 'row')}, and {path} {len(rows):,}: one for each is needed"
        )
    texts: dict[str, str] = {}
    if section.corpus is not None:
        texts = corpus_texts(section.corpus, {name for _, name in named})
    for number, (place, name) in enumerate(named):
        text = name if section.corpus is None else text_named(place, "id", name, texts)
        yield f"{path}, row {number + 1}", text, np.asarray(rows[number], dtype=np.float32)


def _named(path: Path, *, by_id: bool) -> Iterator[tuple[str, str]]:
    """The place and the text, or the id, of each row of a file of them: lines, an array of ids, or a table."""
    suffix = suffix_of(path)
    if suffix == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            raise DataError(
                f"{path}: no array of numbers or texts; np.save(FILE, np.array(IDS, dtype=str)) writes ids"
            ) from None
        if not by_id or values.ndim != 1:
            raise DataError(f"{path}: ids in a row are expected, with distillation.corpus for their texts")
        yield from ((f"{path}, row {number}", str(value)) for number, value in enumerate(values.tolist(), start=1))
    elif suffix not in suffixes() or suffix == ".txt":
        yield from ((f"{path}, line {number}", line.strip()) for number, line in enumerate(read_lines([path]), start=1))
    else:
        table = open_table(path)
        if by_id:
            column = next((name for name in DOCUMENT_IDS if name in table.columns), None)
        else:
            column = _text_column(path, table.columns, "call it text; ids need distillation.corpus")
        if column is None:
            raise DataError(f"{path}: no column of ids: {', '.join(map(shown, table.columns[:10]))}")
        for place, _, row in table.rows:
            yield place, (id_of if by_id else text_of)(place, column, row.get(column))
