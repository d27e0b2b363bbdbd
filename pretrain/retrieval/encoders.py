"""Any text encoder as one kind of object: our runs, Hugging Face folders, sentence-transformers folders, hub ids."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import CheckpointError, ConfigError, quoted
from capt.pretrain.base.verification import sha256
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.language.restore import load_hf, load_model
from capt.pretrain.language.sentence_folder import load_sentence_model
from capt.pretrain.models.architecture import encoder_class, encoder_of_type
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import load_encoder as load_foreign
from capt.pretrain.models.foreign.read import read_encoder
from capt.pretrain.models.heads import mean_over_tokens
from capt.pretrain.models.hf_config import SENTENCE_FILES, TOKENIZER_FILES, local_folder
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.retrieval.store import DType, Identity, digest
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

Role = Literal["query", "document", "text"]
"""What a text is: it decides the prompt."""
POOLINGS = ("mean", "cls", "head")
_TOKENIZED = 512
"""Texts that are tokenized together: all their tokens are in memory."""
_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus"), "text": ()}
"""Names of prompts in a sentence-transformers folder for each role, as that library looks for them."""


@dataclass(frozen=True)
class EncoderOptions:
    """What a user may decide about an encoder.

    Attributes:
        pooling: mean, cls or head; not for sentence-transformers folders, which say it themselves.
        length: tokens of a text at most; without it the model's own limit.
        query_prompt: precedes every query; without it that of the folder.
        document_prompt: precedes every document.
    """

    pooling: str | None = None
    length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None


class TextEncoder(ABC):
    """A model in evaluation mode that turns texts into vectors."""

    name: str
    dimension: int
    similarity: str = "cosine"
    _facts: dict[str, Any]

    def __init__(self, name: str, prompts: Mapping[str, str], options: EncoderOptions) -> None:
        self.name = name
        given = {"query": options.query_prompt, "document": options.document_prompt}
        self.prompts = {role: prompts.get(role, "") for role in ("query", "document", "text")}
        self.prompts |= {role: prompt for role, prompt in given.items() if prompt is not None}

    def identity(self, role: Role, dtype: DType = "fp32") -> Identity:
        """Everything that decides the vector of a text in ``role``."""
        return Identity(prompt=self.prompts[role], dimension=self.dimension, dtype=dtype, **self._facts)

    def protocol(self) -> str:
        """How a text becomes a vector, in one line."""
        facts = self._facts
        prompts = ", ".join(f"{role} {self.prompts[role]!r}" for role in ("query", "document") if self.prompts[role])
        length = f"at most {facts['length']} tokens" if facts["length"] else "texts of any length"
        return (
            f"{self.similarity} of {self.dimension} dimensions, {facts['pooling']}, {length}, "
            f"{'prompts ' + prompts if prompts else 'no prompts'}, {facts['precision']} on {device().type}"
        )

    def require_room(self) -> None:
        """Raise ``ConfigError`` for a prompt that leaves no token for a text, so that all texts would be alike."""
        for role in ("query", "document"):
            length = self._facts["length"]
            if self.prompts[role] and length and self.lengths([""], role)[0] >= length:
                raise ConfigError(
                    f"{self.name}: the {role} prompt {self.prompts[role][:60]!r} fills all {length} tokens, and leaves "
                    f"none for a text; shorten it (--{role}-prompt) or raise --length"
                )

    @abstractmethod
    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text as the model sees it."""

    @abstractmethod
    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """A vector for each text, in one batch, in fp32, not normalized."""


class OwnEncoder(TextEncoder):
    """A model of ours, or of a family that `capt.pretrain.models.foreign` knows, and one of `POOLINGS`."""

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        pool: Callable[[Float[Tensor, "n L h"], Int[Tensor, "n L"]], Tensor],
        tokenizer: TextTokenizer,
        facts: Mapping[str, Any],
        options: EncoderOptions,
    ) -> None:
        super().__init__(name, {}, options)
        room = encoder.max_positions
        if options.length is not None and not 3 <= options.length <= room:
            raise ConfigError(f"length {options.length}: {name} takes 3 to {room} tokens")
        self._encoder, self._pool, self._tokenizer = encoder.to(device()).eval(), pool, tokenizer
        self._facts = {**facts, "length": options.length or room}
        self.dimension = self._vectors([[self._tokenizer.special.bos, self._tokenizer.special.eos]]).shape[1]
        self.require_room()

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text, with ``<s>`` and ``</s>``."""
        return [len(row) for row in self._ids(texts, role)]

    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """The vectors of ``<s> prompt text </s>``, cut to the length."""
        return self._vectors(self._ids(texts, role))

    def _ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        special, room = self._tokenizer.special, self._facts["length"] - 2
        rows = self._tokenizer.encode_batch([self.prompts[role] + text for text in texts])
        return [[special.bos, *row[:room].tolist(), special.eos] for row in rows]

    @torch.inference_mode()
    def _vectors(self, ids: list[list[int]]) -> Float[np.ndarray, "n d"]:
        longest, pad = max(map(len, ids)), self._tokenizer.special.pad
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=device())
        hidden = self._encoder(tokens, padded=any(len(row) < longest for row in ids)).float()
        return self._pool(hidden, tokens).float().cpu().numpy()


class SentenceEncoder(TextEncoder):
    """A sentence-transformers folder, computed by that library: modules, prompts and pooling as the folder says."""

    def __init__(self, name: str, model: Any, facts: Mapping[str, Any], options: EncoderOptions) -> None:
        saved = {prompt: text for prompt, text in (model.prompts or {}).items() if text}
        default = saved.get(model.default_prompt_name or "", "")
        prompts = {
            role: next((saved[each] for each in names if each in saved), default) for role, names in _NAMES.items()
        }
        super().__init__(name, prompts, options)
        self._model = model.to(device()).eval()
        if options.length is not None:
            if self._limit() is None:
                raise ConfigError(f"length {options.length}: {name} takes texts of any length; leave it out")
            room = _positions(model)
            if room is not None and options.length > room:
                raise ConfigError(f"length {options.length}: {name} takes at most {room} tokens")
            self._model.max_seq_length = options.length
        self.similarity = "dot" if model.similarity_fn_name in ("dot", "dot_product") else "cosine"
        self._routes = any("Router" in type(module).__name__ for module in model.modules())
        self._facts = {**facts, "length": self._limit() or 0}
        self.dimension = int(self.encode(["a text"], "text").shape[1])
        self.require_room()

    def _limit(self) -> int | None:
        """Tokens of a text at most; None where there is no limit, as for tables of vectors."""
        limit = self._model.max_seq_length
        return int(limit) if limit and math.isfinite(limit) else None

    def identity(self, role: Role, dtype: DType = "fp32") -> Identity:
        """Everything that decides the vector; with the role where the model has a path for each."""
        identity = super().identity(role, dtype)
        if not self._routes:
            return identity
        return Identity(**{**vars(identity), "prompt": f"{role}: {identity.prompt}"})

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text; of characters where the folder has no such tokenizer."""
        prompt = self.prompts[role]
        tokenizer = getattr(getattr(self._model, "tokenizer", None), "_tokenizer", None)
        if tokenizer is None:
            return [len(prompt) + len(text) for text in texts]
        longest, counts = self._facts["length"] or 1 << 30, []
        for start in range(0, len(texts), _TOKENIZED):
            rows = tokenizer.encode_batch_fast([prompt + text for text in texts[start : start + _TOKENIZED]])
            counts += [min(sum(row.attention_mask), longest) for row in rows]
        return counts

    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """The vectors that sentence-transformers gives."""
        chosen = {} if role == "text" or not self._routes else {"task": role}
        rows = self._model.encode(
            list(texts),
            prompt=self.prompts[role] or None,
            batch_size=len(texts),
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=False,
            **chosen,
        )
        return np.asarray(rows, dtype=np.float32)


def _positions(model: Any) -> int | None:
    """Tokens that a sentence-transformers model has positions for; None where it does not say."""
    config: Any = getattr(getattr(model[0], "auto_model", None), "config", None)
    room = getattr(config, "max_position_embeddings", None)
    if not isinstance(room, int):
        return None
    return room - config.pad_token_id - 1 if config.model_type in encoder_class("roberta").hf.types else room


def load_text_encoder(path: Path, options: EncoderOptions) -> TextEncoder:
    """The encoder at ``path``: a run or checkpoint of ours, a Hugging Face or sentence-transformers folder, a hub id.

    Raises:
        CheckpointError: none of them, damaged, or code or pickles in it.
        ConfigError: the pooling or the length is not one that it has.
    """
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise ConfigError(f"pooler {options.pooling!r}: choose from {', '.join(POOLINGS)}")
    folder = local_folder(path, SENTENCE_FILES)
    if (folder / "modules.json").is_file():
        if options.pooling is not None:
            raise ConfigError(f"{path}: a sentence-transformers folder says itself how it pools; leave --pooler out")
        model = load_sentence_model(folder)
        pooled = " + ".join(type(module).__name__ for module in model.children())
        return SentenceEncoder(str(path), model, _facts(_hashes(folder), pooled), options)
    pooling = options.pooling or "mean"
    if is_hf(folder):
        facts = _facts(_hashes(folder), pooling)
        if encoder_of_type(read_json(folder / "config.json").get("model_type")) is None:
            return _of_foreign(path, folder, pooling, facts, options)
        restored = load_hf(folder)
    elif folder.is_dir():
        checkpoint = find_best(folder)
        manifest = read_manifest(checkpoint)
        if manifest.task != "capt_language":
            raise CheckpointError(
                f"{path}: a checkpoint of task {manifest.task}; make a folder of it first: "
                f"capt convert {quoted(path)} OUT --to sentence-transformers"
            )
        hashes = {name: record.sha256 for name, record in manifest.files.items()}
        facts = _facts(hashes, pooling)
        restored = load_model(checkpoint)
    else:
        raise CheckpointError(f"{path}: no such folder")
    pool = _pool_of(restored.model, pooling, str(path))
    return OwnEncoder(str(path), restored.model.encoder, pool, restored.tokenizer, facts, options)


def _of_foreign(
    path: Path, folder: Path, pooling: str, facts: Mapping[str, Any], options: EncoderOptions
) -> TextEncoder:
    if pooling == "head":
        raise CheckpointError(f"{path}: it has no aggregation head; use --pooler mean or cls")
    pretrained = read_encoder(folder)
    encoder = load_foreign(pretrained, str(path))
    pad = encoder.pad_id

    def pool(hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"]) -> Tensor:
        return hidden[:, 0] if pooling == "cls" else mean_over_tokens(hidden, tokens, pad)

    return OwnEncoder(str(path), encoder, pool, pretrained.tokenizer, facts, options)


def _pool_of(model: CaptModel, pooling: str, source: str) -> Callable[[Tensor, Tensor], Tensor]:
    if pooling == "head" and model.aggregation is None:
        raise CheckpointError(f"{source}: trained without contrast, so it has no aggregation head; use mean or cls")
    model.to(device()).eval()
    read = model.config.pooling if pooling == "head" else pooling

    def pool(hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"]) -> Tensor:
        rows = hidden[:, 0] if read == "cls" else mean_over_tokens(hidden, tokens, model.encoder.pad_id)
        return model.aggregation(rows) if pooling == "head" and model.aggregation is not None else rows

    return pool


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder that can decide a vector."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".safetensors", ".txt", ".model")]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def _facts(hashes: Mapping[str, str], pooling: str) -> dict[str, Any]:
    """The parts of an `Identity` that files decide."""
    of_tokenizer = {
        name: value
        for name, value in hashes.items()
        if name.startswith("tokenizer/") or any(Path(name).match(pattern) for pattern in TOKENIZER_FILES)
    }
    model = digest((name, value) for name, value in hashes.items() if name not in of_tokenizer)
    return {
        "model": model,
        "tokenizer": digest(of_tokenizer.items()),
        "pooling": pooling,
        "precision": "fp32",
    }
