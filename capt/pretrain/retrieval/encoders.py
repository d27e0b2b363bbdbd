"""Any text encoder as one kind of object: our runs, Hugging Face folders, sentence-transformers folders, hub ids."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.base.verification import sha256
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.engine.task import Role
from capt.pretrain.language.load import load_hf, load_model
from capt.pretrain.models.architecture import encoder_class, encoder_of_type
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import load_encoder as load_foreign
from capt.pretrain.models.foreign.encoder import read_encoder
from capt.pretrain.models.foreign.families import FAMILIES
from capt.pretrain.models.heads import mean_over_tokens
from capt.pretrain.models.hf_config import SENTENCE_FILES, TOKENIZER_FILES, local_folder
from capt.pretrain.models.hf_folder import PICKLES, is_hf, read_json, require_regular, require_weights
from capt.pretrain.models.sentence_folder import modules_of, pooling_file
from capt.pretrain.pairs.batches import PaddedTexts
from capt.pretrain.pairs.load import load_model as load_pairs
from capt.pretrain.retrieval.store import DType, Identity, digest
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


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

    def limit(self, role: Role) -> int:
        """Tokens of a text at most, its prompt and special tokens included; 0 = of any length."""
        return int(self._facts["length"])

    def identity(self, role: Role, dtype: DType = "fp32") -> Identity:
        """Everything that decides the vector of a text in ``role``."""
        facts = {**self._facts, "length": self.limit(role)}
        return Identity(prompt=self.prompts[role], dimension=self.dimension, dtype=dtype, **facts)

    def protocol(self) -> str:
        """How a text becomes a vector, in one line."""
        facts = self._facts
        prompts = ", ".join(f"{role} {self.prompts[role]!r}" for role in ("query", "document") if self.prompts[role])
        query, document = self.limit("query"), self.limit("document")
        length = f"at most {document} tokens" if document else "texts of any length"
        length += f" ({query} of a query)" if query != document else ""
        return (
            f"{self.similarity} of {self.dimension} dimensions, {facts['pooling']}, {length}, "
            f"{'prompts ' + prompts if prompts else 'no prompts'}, {facts['precision']} on {device().type}"
        )

    def require_room(self) -> None:
        """Raise ``ConfigError`` for a prompt that leaves no token for a text, so that all texts would be alike."""
        for role in ("query", "document"):
            length = self.limit(role)
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


Embed = Callable[[Int[Tensor, "n L"], bool], Float[Tensor, "n d"]]
"""The vectors of padded rows of ids; the flag says whether any of them is padded."""


class OwnEncoder(TextEncoder):
    """A model of ours, or of a family that `capt.pretrain.models.foreign` knows.

    Args:
        name: for messages.
        embed: the model, on this rank's device.
        tokenizer: of the model.
        room: tokens of a text at most.
        facts: the parts of an `Identity` that files decide.
        options: what the user has decided.
        prompts: of the model, by role.
        limits: tokens of a query and of a document at most, where the model has a limit for each.
    """

    def __init__(
        self,
        name: str,
        embed: Embed,
        tokenizer: TextTokenizer,
        room: int,
        facts: Mapping[str, Any],
        options: EncoderOptions,
        *,
        prompts: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(name, prompts or {}, options)
        if options.length is not None and not 3 <= options.length <= room:
            raise ConfigError(f"length {options.length}: {name} takes 3 to {room} tokens")
        self._embed, self._tokenizer = embed, tokenizer
        # A length that the user gave holds for queries and documents alike.
        self._limits = {} if options.length is not None else dict(limits or {})
        self._facts = {**facts, "length": options.length or room}
        # One empty text tells the number of columns.
        self.dimension = self._vectors([[self._tokenizer.special.bos, self._tokenizer.special.eos]]).shape[1]
        self.require_room()

    def limit(self, role: Role) -> int:
        """The most tokens of a text. Where each role has a limit, a text without a role has the document's."""
        return self._limits.get("document" if role == "text" else role, super().limit(role))

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text, with ``<s>`` and ``</s>``."""
        return [len(row) for row in self._ids(texts, role)]

    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """The vectors of ``<s> prompt text </s>``, cut to the length."""
        return self._vectors(self._ids(texts, role))

    def _ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        return self._tokenizer.encode_framed([self.prompts[role] + text for text in texts], self.limit(role))

    @torch.inference_mode()
    def _vectors(self, ids: list[list[int]]) -> Float[np.ndarray, "n d"]:
        longest, pad = max(map(len, ids)), self._tokenizer.special.pad
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=device())
        return self._embed(tokens, any(len(row) < longest for row in ids)).float().cpu().numpy()


class SentenceEncoder(TextEncoder):
    """A sentence-transformers folder, computed by that library: modules, prompts and pooling as the folder says."""

    def __init__(self, name: str, model: Any, facts: Mapping[str, Any], options: EncoderOptions) -> None:
        # The prompts of the folder, by the names that the library looks for.
        saved = dict(model.prompts or {})
        default = saved.get(model.default_prompt_name or "", "")
        named = {role: [saved[name] for name in names if name in saved] for role, names in _NAMES.items()}
        # the library adds an empty "document" to a folder whose prompt is called "passage"
        prompts = {role: next(filter(None, texts), "") if texts else default for role, texts in named.items()}
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
        if model.similarity_fn_name in ("euclidean", "manhattan"):
            logger.warning(
                "%s: made for %s distances; texts are compared by cosine here", name, model.similarity_fn_name
            )
        # A router sends queries and documents through different modules.
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
        longest, counts = self.limit(role) or 1 << 30, []
        # In parts: a fast tokenizer keeps all encodings of a call in memory.
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
            # The store keeps them as they are: a dot product may be what the model was trained for.
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
    family = FAMILIES.get(config.model_type)
    counts_from_padding = (
        family.counts_from_padding if family else config.model_type in encoder_class("roberta").hf.types
    )
    # RoBERTa and those like it count positions from the padding id on.
    return room - config.pad_token_id - 1 if counts_from_padding else room


def load_text_encoder(path: Path, options: EncoderOptions) -> TextEncoder:
    """The encoder at ``path``: a run or checkpoint of ours, a Hugging Face or sentence-transformers folder, a hub id.

    Raises:
        CheckpointError: none of them, damaged, or code or pickles in it.
        ConfigError: the pooling or the length is not one that it has.
    """
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise ConfigError(f"pooler {options.pooling!r}: choose from {', '.join(POOLINGS)}")
    folder = local_folder(path, SENTENCE_FILES)
    # A sentence-transformers folder is a Hugging Face folder as well, so it is asked first.
    if (folder / "modules.json").is_file():
        if options.pooling is not None:
            raise ConfigError(f"{path}: a sentence-transformers folder says itself how it pools; leave --pooler out")
        model = load_sentence_model(folder)
        pooled = " + ".join(type(module).__name__ for module in model.children())
        return SentenceEncoder(str(path), model, _facts(_hashes(folder), pooled), options)
    if options.pooling is None:
        pooling_file(folder)  # refuses a folder that has lost its modules.json
    pooling = options.pooling or "mean"
    if is_hf(folder):
        facts = _facts(_hashes(folder), pooling)
        if encoder_of_type(read_json(folder / "config.json").get("model_type")) is None:
            return _of_foreign(path, folder, pooling, facts, options)
        trained = load_hf(folder)
    elif folder.is_dir():
        checkpoint = find_best(folder)
        manifest = read_manifest(checkpoint)
        if manifest.task == "capt_pairs":
            return _of_pairs(path, checkpoint, options)
        if manifest.task != "capt_language":
            raise CheckpointError(
                f"{path}: a checkpoint of task {manifest.task}, which has no vectors of texts; give one of "
                "capt_language or capt_pairs"
            )
        facts = _facts(_hashes_of(checkpoint), pooling)
        trained = load_model(checkpoint)
    else:
        raise CheckpointError(f"{path}: no such folder")
    embed = _embed_of(trained.model, pooling, str(path))
    return OwnEncoder(
        str(path), embed, trained.tokenizer, trained.model.encoder.max_positions, facts, options
    )  # fmt: skip


def _of_pairs(path: Path, checkpoint: Path, options: EncoderOptions) -> TextEncoder:
    """A model of pairs, with the prompts and lengths of its source of the largest weight, as its export has them."""
    if options.pooling is not None:
        raise ConfigError(f"{path}: a run of pairs pools as it was trained; leave --pooler out")
    trained = load_pairs(checkpoint)
    model = trained.model.to(device())
    read = trained.reading()
    # The digest of files, and not the path: a copy of the model finds the same vectors.
    facts = _facts(_hashes_of(checkpoint), f"{model.encoder.pooling}, projection {model.projection is not None}")

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        return model.embed(PaddedTexts(tokens, padded))

    return OwnEncoder(
        str(path), embed, trained.tokenizer, model.encoder.model.max_positions, facts, options,
        prompts={"query": read.prompts.query, "document": read.prompts.document},
        limits={"query": read.query_length, "document": read.document_length},
    )  # fmt: skip


def _of_foreign(
    path: Path, folder: Path, pooling: str, facts: Mapping[str, Any], options: EncoderOptions
) -> TextEncoder:
    if pooling == "head":
        raise CheckpointError(f"{path}: it has no aggregation head; use --pooler mean or cls")
    pretrained = read_encoder(folder)
    encoder = load_foreign(pretrained, str(path)).to(device()).eval()

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        return _pooled(encoder, tokens, padded, pooling)

    return OwnEncoder(str(path), embed, pretrained.tokenizer, encoder.max_positions, facts, options)


def _embed_of(model: CaptModel, pooling: str, source: str) -> Embed:
    if pooling == "head" and model.aggregation is None:
        raise CheckpointError(f"{source}: trained without contrast, so it has no aggregation head; use mean or cls")
    model.to(device()).eval()
    # The head reads what it was trained on.
    read = model.config.pooling if pooling == "head" else pooling

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        rows = _pooled(model.encoder, tokens, padded, read)
        return model.aggregation(rows) if pooling == "head" and model.aggregation is not None else rows

    return embed


def _pooled(encoder: Encoder, tokens: Int[Tensor, "n L"], padded: bool, pooling: str) -> Float[Tensor, "n h"]:
    """The hidden state of the first token (cls), of which the last layer computes no other, or their mean."""
    if pooling == "cls":
        return encoder(tokens, padded=padded, rows=torch.zeros_like(tokens[:, :1]))[:, 0].float()  # type: ignore[no-any-return]
    return mean_over_tokens(encoder(tokens, padded=padded).float(), tokens, encoder.pad_id)


def _hashes_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, as its manifest has them."""
    return {name: record.sha256 for name, record in read_manifest(checkpoint).files.items()}


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
    # A new file of the tokenizer gives other tokens, and so other vectors, with the same weights.
    model = digest((name, value) for name, value in hashes.items() if name not in of_tokenizer)
    return {
        "model": model,
        "tokenizer": digest(of_tokenizer.items()),
        "pooling": pooling,
        "precision": "fp32",
    }


# A sentence-transformers folder that somebody else may have written, loaded without running anything in it.


_MAX_FILES = 1000


def load_sentence_model(path: Path) -> Any:
    """The ``SentenceTransformer`` in a folder, or of the hub model it names, on the CPU.

    Raises:
        CheckpointError: no such folder, not sentence-transformers', pickles or code in it, or damaged.
    """
    folder = local_folder(path, SENTENCE_FILES)
    if not (folder / "modules.json").is_file():
        what = "no modules.json; capt convert --to sentence-transformers writes such a folder"
        raise CheckpointError(f"{path}: {what if folder.is_dir() else 'no such folder'}")
    _check(folder)
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers():
            model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"use_safetensors": True}, **options)
            model.encode(["a text"], show_progress_bar=False)
        return model
    except Exception as error:  # what its many readers raise for a file that they do not like
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: sentence-transformers cannot use it: {type(error).__name__}: {text}") from None


def _check(folder: Path) -> None:
    modules_of(folder)
    # Bounded: somebody's home folder may be named by mistake.
    for number, path in enumerate(folder.rglob("*")):
        if number > _MAX_FILES:
            raise CheckpointError(f"{folder}: over {_MAX_FILES} files; name the folder of one model")
        if path.suffix in PICKLES:
            if path.name == "pytorch_model.bin":
                require_weights(path.parent)  # names the command that converts it
            raise CheckpointError(f"{path}: a pickle, which could run code when it is opened; remove it")
        if not path.is_dir() or path.is_symlink():
            require_regular(path)
        if path.name in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
            read_json(path)
