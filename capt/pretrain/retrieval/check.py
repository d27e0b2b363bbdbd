"""``capt check``: whether a text has one vector, or a pair one score, whatever is beside it and what computes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import ConfigError, UserError, quoted
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.commands import task_of
from capt.pretrain.convert.onnx import GRAPH
from capt.pretrain.convert.quantized import INT8_GRAPH, VectorSpread, least_rank
from capt.pretrain.convert.reference import LONG_TEXT, ONE_VECTOR, SPREAD, TEXTS, one_vector, relative_change
from capt.pretrain.models.hf_config import SENTENCE_FILES, local_folder
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.models.sentence_folder import (
    SETTINGS,
    encoder_folder,
    is_classifier,
    labels_of,
    modules_of,
    scores_pairs,
)
from capt.pretrain.pairs.load import pooling_of_folder
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.rerankers import PairScorer, load_reranker

CheckVerdict = Literal["ok", "fault", "note", "left out"]
Rows = Float[np.ndarray, "n d"]

_HALF = 0.95
"""Cosine of a vector in fp32 and in bf16, below which the latter is another vector."""
_ONE_SCORE = 1e-6
"""Distance of the highest and the lowest score of documents that differ, below which they are one."""
_ALIKE = 1e-4
"""Mean squared distance of unit rows of different texts, below which they are one point."""
_UNREACHABLE, _UNKNOWN = 0.05, 0.05
"""Share of a vocabulary that the normalisation cannot produce, and of pieces that are unknown for their case alone."""
_PACKED = frozenset(
    ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "mpnet", "modernbert")
)
"""Families that take positions and a mask of texts that lie in one row."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: ``fault`` is what makes a vector wrong, ``note`` what a user should know."""

    name: str
    verdict: CheckVerdict
    text: str
    value: float | None = None


def check(path: Path) -> list[Finding]:
    """Check the model at ``path``: what `load_text_encoder` or `load_reranker` takes, or a folder with ONNX alone.

    Raises:
        ConfigError: a classifier of several classes.
    """
    folder = local_folder(path, SENTENCE_FILES)
    with quiet_transformers():
        if (folder / GRAPH).is_file() and not any(folder.glob("*.safetensors")):
            return _findings(_GraphChecks(folder / GRAPH, folder))
        _refuse_classifier(folder)
        try:
            if _gives_scores(folder):
                return _findings(_PairChecks(load_reranker(path)))
            encoder = load_text_encoder(path, EncoderOptions())
        except UserError as error:
            return [Finding("loading", "fault", str(error))]
        return _findings(_Checks(encoder, folder if is_hf(folder) else None))


def _gives_scores(folder: Path) -> bool:
    """Return whether a folder, or a run, is a reranker's and no encoder's."""
    if not folder.is_dir():
        return False
    if not is_hf(folder) and not (folder / "modules.json").is_file():
        return task_of(folder) not in ("capt_language", "capt_pairs")
    config, settings = (
        read_json(path) if (path := folder / name).is_file() else {} for name in ("config.json", SETTINGS)
    )
    if kind := settings.get("model_type"):
        return bool(kind == "CrossEncoder")
    return not (folder / "modules.json").is_file() and scores_pairs(config)


def _refuse_classifier(folder: Path) -> None:
    """Raise ``ConfigError`` for a folder that has scores of several classes, which is sound and nothing for this."""
    path = folder / "config.json"
    if not path.is_file() or any((folder / name).is_file() for name in ("modules.json", SETTINGS)):
        return
    config = read_json(path)
    if is_classifier(config) and not scores_pairs(config):
        raise ConfigError(
            f"{folder} is a classifier of {labels_of(config)} classes: encoders and rerankers are checked; its answers "
            f"are those of capt predict {quoted(folder)} FILE --out predictions.csv"
        )


def _findings(checks: _OfVectors | _PairChecks) -> list[Finding]:
    found = []
    for name, function in checks.all():
        try:
            found += [Finding(name, *outcome) for outcome in function()]
        except UserError as error:
            found.append(Finding(name, "fault", str(error)))
    return found


_Outcome = tuple[CheckVerdict, str] | tuple[CheckVerdict, str, float]


def _judged(value: float, limit: float, text: str) -> _Outcome:
    return ("ok" if value <= limit else "fault", f"{text}: {value:.1e} of a vector's length (allowed {limit:g})", value)


class _OfVectors:
    """Checks that need vectors of texts alone."""

    def __init__(self, encode: Callable[[list[str]], Rows]) -> None:
        self.encode = encode

    def all(self) -> list[tuple[str, Callable[[], Iterator[_Outcome]]]]:
        """The checks, each with its name."""
        return [("alone", self.company), ("dimensions", self.dimensions)]

    def company(self) -> Iterator[_Outcome]:
        """A text alone, among others, and beside a long one."""
        worst, beside = one_vector(self.encode)
        yield _judged(worst, ONE_VECTOR, "a text alone and among others")
        yield _judged(beside, ONE_VECTOR, "a short text alone and beside one as long as the model reads")

    def dimensions(self) -> Iterator[_Outcome]:
        """Effective rank and uniformity of vectors of texts that differ."""
        rows = self.encode(list(SPREAD)).astype(np.float64)
        if not np.isfinite(rows).all():
            yield "fault", "vectors hold values that are not finite"
            return
        found = VectorSpread.of(rows)
        least = least_rank(rows.shape[1])
        text = (
            f"vectors of {len(rows)} texts have an effective rank of {found.rank:.1f} in {rows.shape[1]} columns, and "
            f"a uniformity of {found.uniformity:.2f}"
        )
        if found.distance < _ALIKE or found.rank < least:
            yield "fault", f"{text}: they have collapsed (a rank of {least:g} is the least)", found.rank
        else:
            yield "ok", text, found.rank
        if unused := found.unused:
            yield "note", f"{unused} of {rows.shape[1]} columns are the same for every text", float(unused)


class _PairChecks:
    """Checks of a reranker."""

    def __init__(self, scorer: PairScorer) -> None:
        self.scorer = scorer

    def all(self) -> list[tuple[str, Callable[[], Iterator[_Outcome]]]]:
        """The checks, each with its name."""
        return [("alone", self.company), ("scores", self.spread), ("truncation", self.truncation)]

    def _scores(self, documents: Sequence[str]) -> Float[np.ndarray, " n"]:
        return self.scorer.encode([(TEXTS[0], document) for document in documents])[:, 0]

    def company(self) -> Iterator[_Outcome]:
        """A pair alone, among others, and beside a long one."""
        alone = np.concatenate([self._scores([text]) for text in TEXTS])
        short = min(range(len(TEXTS)), key=lambda number: len(TEXTS[number]))
        beside = self._scores([TEXTS[short], LONG_TEXT])[:1]
        for text, changed in (
            ("a pair alone and among others", np.abs(alone - self._scores(list(TEXTS)))),
            ("a short pair alone and beside one as long as the model reads", np.abs(alone[[short]] - beside)),
        ):
            # Of a large score its last digits change with the order of sums.
            change = float(changed.max() / max(1.0, np.abs(alone).max()))
            outcome: CheckVerdict = "ok" if change <= ONE_VECTOR else "fault"
            yield outcome, f"{text}: {change:.1e} of a score (allowed {ONE_VECTOR:g})", change

    def spread(self) -> Iterator[_Outcome]:
        """Scores of documents that differ."""
        scores = self._scores(SPREAD)
        extent = float(scores.max() - scores.min())
        different = len(set(scores.tolist()))
        text = f"{different} different scores of {len(SPREAD)} documents, {scores.min():.4g} to {scores.max():.4g}"
        if extent < _ONE_SCORE:
            yield "fault", f"{text}: no order can be told from them", extent
        else:
            yield "ok", text, extent

    def truncation(self) -> Iterator[_Outcome]:
        """The beginning of a long document is read, and nothing of its end."""
        limit = self.scorer.identity().length
        if not limit:
            yield "left out", "pairs of any length are read"
            return
        words = LONG_TEXT * (1 + 8 * limit // len(LONG_TEXT))
        first, second = self._scores([words + end for end in ("", "Another end.")])
        change = float(abs(first - second))
        verdict: CheckVerdict = "ok" if change <= ONE_VECTOR * max(1.0, abs(first)) else "fault"
        yield verdict, f"another end of a document behind the first {limit} tokens of a pair: {change:.1e}", change


class _GraphChecks(_OfVectors):
    """Checks of an ONNX graph without weights beside it."""

    def __init__(self, graph: Path, folder: Path) -> None:
        super().__init__(_graph(graph, folder))


class _Checks(_OfVectors):
    """Checks of an encoder, and of its Hugging Face folder where it is one."""

    def __init__(self, encoder: TextEncoder, folder: Path | None) -> None:
        super().__init__(lambda texts: encoder.encode(texts, "text"))
        self.encoder, self.folder = encoder, folder

    def all(self) -> list[tuple[str, Callable[[], Iterator[_Outcome]]]]:
        """The checks, each with its name."""
        return [
            *super().all(), ("prompts", self.prompts), ("truncation", self.truncation), ("bf16", self.half),
            ("tokenizer", self.tokenizer), ("transformers", self.library), ("onnx", self.graphs),
        ]  # fmt: skip

    def prompts(self) -> Iterator[_Outcome]:
        """A prompt is text before the text, and leaves room for it."""
        given = {role: prompt for role, prompt in self.encoder.prompts.items() if prompt}
        if not given:
            yield "left out", "the model has no prompts"
        for role, prompt in given.items():
            asked = self.encoder.encode([TEXTS[0]], role)  # type: ignore[arg-type]
            before = self.encoder.encode([(prompt if role != "text" else "") + TEXTS[0]], "text")
            change = relative_change(asked, before)
            text = f"{prompt!r} before a {role}, and the same as part of the text, differ by {change:.1e}"
            yield "ok" if change <= ONE_VECTOR else "note", text, change

    def truncation(self) -> Iterator[_Outcome]:
        """The beginning of a long text is read, and nothing of its end."""
        limit = self.encoder.limit("text")
        if not limit:
            yield "left out", "texts of any length are read"
            return
        words = LONG_TEXT * (1 + 8 * limit // len(LONG_TEXT))
        first, second = (self.encode([words + end])[0] for end in ("", "Another end."))
        change = relative_change(first[None], second[None])
        longest = self.encoder.lengths([words], "text")[0]
        text = f"another end of a text behind its first {limit} tokens"
        yield _judged(change, ONE_VECTOR, text)
        if longest > limit:
            yield "fault", f"a long text has {longest} tokens, more than {limit}", float(longest)

    def half(self) -> Iterator[_Outcome]:
        """The vectors of bf16 point where those of fp32 do."""
        full = self.encode(list(TEXTS))
        with torch.autocast(device().type, dtype=torch.bfloat16):
            half = self.encode(list(TEXTS))
        cosine = float(_cosines(full, half).min())
        # `not >=`, so that a value which is not a number is a fault.
        yield "ok" if cosine >= _HALF else "fault", f"cosine with the vector in bf16 {cosine:.4f} at least", cosine

    def tokenizer(self) -> Iterator[_Outcome]:
        """Pieces that are unknown, and a vocabulary that does not fit the normalisation."""
        backend = _backend(self.encoder)
        if backend is None:
            yield "left out", "its tokenizer is none of the package tokenizers"
            return
        unknown = _unknown_token(backend)

        def share_unknown(text: str) -> float:
            """Unknown pieces a word, of which a word in letters has one."""
            pieces: list[str] = backend.encode(text, add_special_tokens=False).tokens
            return pieces.count(unknown) / len(text.split())

        english = " ".join(text for text in (*TEXTS, *SPREAD) if text.isascii())
        cased, lower = share_unknown(english), share_unknown(english.lower())
        if cased > lower + _UNKNOWN:
            yield (
                "fault", f"{cased:.0%} of the words of English text hold an unknown piece, and {lower:.0%} of it in "
                "lower case: the vocabulary is of lower case, and the normalisation keeps capitals", cased,
            )  # fmt: skip
        unreachable = _unreachable(backend)
        if unreachable > _UNREACHABLE:
            yield (
                "fault", f"{unreachable:.0%} of the vocabulary can never be read, for the normalisation changes these "
                "pieces (capitals or accents that it takes away)", unreachable,
            )  # fmt: skip
        other = float(np.mean([share_unknown(text) > 0 for text in (*TEXTS, "naïve café", "привет мир", "東京")]))
        yield (
            "note" if other > 0 else "ok",
            f"{other:.0%} of texts in several scripts hold unknown pieces",
            other,
        )
        ids = backend.encode(TEXTS[0], add_special_tokens=False).ids
        back = "".join(backend.decode(ids).split())
        kept = back == "".join(TEXTS[0].split())
        yield (
            "ok" if kept else "note",
            f"decoded again, a text {'is' if kept else 'is not'} what it was, but for spaces",
        )

    def library(self) -> Iterator[_Outcome]:
        """The vectors of transformers, padded and packed, pooled as the folder says."""
        if self.folder is None:
            yield "left out", "a run: capt convert --to sentence-transformers writes a folder, and compares its vectors"
            return
        kinds = [kind for kind, _ in modules_of(self.folder)] if (self.folder / "modules.json").is_file() else []
        if kinds[:1] not in ([], ["Transformer"]):
            yield "left out", f"its first module is {kinds[0]}"
            return
        others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        pooling = pooling_of_folder(self.folder) or "mean"
        if others:
            yield "left out", f"behind the pooling the folder has {', '.join(others)}"
            return
        theirs = _Transformers(encoder_folder(self.folder), pooling, self.encoder.limit("text"))
        ours = self.encode(list(TEXTS))
        text = f"transformers' own states, pooled by {pooling} as the folder says"
        yield _judged(_turn(ours, theirs.padded(list(TEXTS))), ONE_VECTOR, text)
        if theirs.family not in _PACKED:
            yield "left out", f"texts packed into one row: not known of model_type {theirs.family}"
            return
        packed = _turn(ours, theirs.packed(list(TEXTS)))
        yield _judged(packed, ONE_VECTOR, "texts packed into one row with others")
        yield from theirs.positions()

    def graphs(self) -> Iterator[_Outcome]:
        """The vectors of each ONNX graph in the folder."""
        found = sorted(self.folder.rglob("*.onnx")) if self.folder is not None else []
        if not found or self.folder is None:
            yield "left out", "no ONNX graph in the folder"
            return
        if importlib.util.find_spec("onnxruntime") is None:
            yield "left out", "onnxruntime is not installed"
            return
        ours = self.encode(list(TEXTS))
        for graph in found:
            if graph.name == INT8_GRAPH:
                continue  # not the same by design; the export has measured it
            theirs = _graph(graph, self.folder, self.encoder.limit("text"))(list(TEXTS))
            text = f"{graph.relative_to(self.folder)}"
            yield _judged(_turn(ours, theirs), ONE_VECTOR, text)


def _cosines(a: Rows, b: Rows) -> Float[np.ndarray, " n"]:
    products = (a.astype(np.float64) * b.astype(np.float64)).sum(1)
    return products / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)).clip(1e-12)  # type: ignore[no-any-return]


def _turn(a: Rows, b: Rows) -> float:
    """The largest change of direction; lengths may differ, where one side has unit rows."""
    if a.shape != b.shape:
        return float("inf")
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12) for rows in (a, b)]
    return relative_change(*unit)


class _Transformers:
    """A folder's encoder and tokenizer in transformers, with its own pooling."""

    def __init__(self, folder: Path, pooling: str, limit: int) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._pooling, self._limit = pooling, limit
        self.family = str(self.model.config.model_type)
        own = folder / "sentence_bert_config.json"
        self._lower = own.is_file() and read_json(own).get("do_lower_case") is True

    def _read(self, texts: list[str], *, padding: bool) -> Any:
        texts = [text.strip().lower() if self._lower else text.strip() for text in texts]
        limit = {"truncation": True, "max_length": self._limit} if self._limit else {}
        return self._tokenizer(texts, padding=padding, **limit, **({"return_tensors": "pt"} if padding else {}))

    @torch.inference_mode()
    def padded(self, texts: list[str]) -> Rows:
        """Vectors of a batch with padding, whose mask is the length of each text."""
        given, single = self._read(texts, padding=True), self._read(texts, padding=False)["input_ids"]
        lengths = torch.tensor(list(map(len, single)))
        mask = (torch.arange(given["input_ids"].shape[1]) < lengths[:, None]).long()
        states = self.model(input_ids=given["input_ids"], attention_mask=mask).last_hidden_state
        return self._pooled([row[:length] for row, length in zip(states, lengths.tolist(), strict=True)])

    @torch.inference_mode()
    def packed(self, texts: list[str]) -> Rows:
        """Vectors of texts that share a row, each with its own positions and attention."""
        single: list[list[int]] = self._read(texts, padding=False)["input_ids"]
        lengths = [len(row) for row in single]
        number = torch.repeat_interleave(torch.arange(len(single)), torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths]) + self.offset()
        seen = number[:, None] == number[None, :]
        mask: Any = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        if self.family == "modernbert":  # short texts are within every window
            mask = {"full_attention": mask, "sliding_attention": mask}
        ids = torch.tensor([token for row in single for token in row])[None]
        states = self.model(input_ids=ids, attention_mask=mask, position_ids=positions[None]).last_hidden_state[0]
        return self._pooled(list(states.split(lengths)))

    def offset(self) -> int:
        """The position of the first token: RoBERTa and its relatives begin behind the row of padding."""
        for module in self.model.modules():
            table, first = getattr(module, "position_embeddings", None), getattr(module, "padding_idx", None)
            if isinstance(first, int) and isinstance(table, torch.nn.Embedding):
                return first + 1
        return 0

    def positions(self) -> Iterator[_Outcome]:
        """Positions begin where the tokenizer's padding says, and there are enough."""
        pad, config = self._tokenizer.pad_token_id, self.model.config
        if self.offset() and pad != config.pad_token_id:
            yield (
                "fault", f"pad_token_id is {config.pad_token_id} in config.json and {pad} in the tokenizer: positions "
                "begin behind the former, so that all are shifted",
            )  # fmt: skip
        room = getattr(config, "max_position_embeddings", None)
        if isinstance(room, int) and self._limit > room - self.offset():
            yield "fault", f"texts of {self._limit} tokens, and {room - self.offset()} positions"

    def _pooled(self, states: list[Tensor]) -> Rows:
        return _pooled(states, self._pooling)


def _pooled(states: list[Tensor], pooling: str) -> Rows:
    """A vector of the states of each text."""
    of = {"mean": lambda each: each.mean(0), "cls": lambda each: each[0], "last": lambda each: each[-1]}[pooling]
    return torch.stack([of(each) for each in states]).float().numpy()


def _graph(path: Path, folder: Path, limit: int = 0) -> Callable[[list[str]], Rows]:
    """Return what an ONNX graph makes of texts: its sentence vectors, or its states pooled as the folder says."""
    import onnxruntime
    from transformers import AutoTokenizer

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_folder(folder), local_files_only=True)
    names, outputs = [each.name for each in session.get_inputs()], [each.name for each in session.get_outputs()]
    whole = next((name for name in outputs if "sentence" in name), None)
    pooling = (pooling_of_folder(folder) if whole is None else None) or "mean"
    cut = {"truncation": True, **({"max_length": limit} if limit else {})}

    def encode(texts: list[str]) -> Rows:
        given = dict(tokenizer(texts, padding=True, return_tensors="np", **cut))
        mask = given.setdefault("attention_mask", np.ones_like(given["input_ids"]))
        given.setdefault("token_type_ids", np.zeros_like(mask))
        given = {name: given[name].astype(np.int64) for name in names}
        if whole is not None:
            return np.asarray(session.run([whole], given)[0], dtype=np.float32)
        states = torch.from_numpy(session.run(outputs[:1], given)[0])
        real = torch.from_numpy(np.asarray(mask)).bool()
        rows = [row[keep] for row, keep in zip(states, real, strict=True)]
        return _pooled(rows, pooling)

    return encode


def _backend(encoder: TextEncoder) -> Any:
    """A copy, without truncation, of the tokenizer (of the package tokenizers) that reads texts; None for another."""
    own = getattr(encoder, "_tokenizer", None)
    model = getattr(getattr(encoder, "_model", None), "tokenizer", None)
    found = getattr(model, "_tokenizer", None) if own is None else own.backend
    if found is None:
        return None
    copy = Tokenizer.from_str(found.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _unknown_token(backend: Any) -> str:
    return next((name for name in ("[UNK]", "<unk>") if backend.token_to_id(name) is not None), "")


def _unreachable(backend: Any) -> float:
    """The share of pieces of the vocabulary that the normalisation turns into others."""
    if backend.normalizer is None:
        return 0.0
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    pieces = [piece for piece in backend.get_vocab() if piece not in special]
    words = [piece.removeprefix("##").replace("▁", "") for piece in pieces]
    words = [word for word in words if word.isalpha()]
    lost: int = sum(backend.normalizer.normalize_str(word).replace("▁", "").strip() != word for word in words)
    return lost / max(1, len(words))
