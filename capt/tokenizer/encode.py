"""Text to ids and back, from a tokenizer folder of any common kind. This is the only way that text becomes ids here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import ConfigError, shown
from capt.tokenizer.classes import check_ids, rust_errors
from capt.tokenizer.formats import open_folder
from capt.tokenizer.special import PairTemplate, SpecialIds, pair_template, resolve_special_ids

_BATCH_CHARACTERS = 4_000_000
_TOKEN_CHARACTERS = 64
"""Characters of a token at most, on the average over a prompt."""
_PROMPT_CHARACTERS = 100_000
"""Characters of a prompt where texts may be of any length: it is read again before every text."""


def _one_thread_after_fork() -> None:
    """A forked child does not have the parent's threads: with the variable true, it would wait for them forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


os.register_at_fork(after_in_child=_one_thread_after_fork)


class TextTokenizer:
    """A vocabulary and the pipeline that turns text into its ids. Made by `load_tokenizer`.

    Attributes:
        special: ids of the special tokens.
        backend: the ``tokenizers.Tokenizer`` underneath.
        model_max_length: the longest sequence, special tokens included, that ``transformers`` should let pass.
    """

    def __init__(self, backend: Tokenizer, special: SpecialIds, *, model_max_length: int = 512) -> None:
        backend.encode_special_tokens = True  # "<mask>" in a corpus is text; nobody meant the token
        self.backend = backend
        self.special = special
        self.model_max_length = model_max_length

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.backend.encode_special_tokens = True  # the one setting that its pickle leaves out

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included: the rows that an embedding table needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """All ids that represent no text, in ascending order: the five roles and any further special token."""
        further = (i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)
        return tuple(sorted({*asdict(self.special).values(), *further}))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, merges or scores, pipeline and special ids: equal for equal tokenization."""
        spec = json.loads(self.backend.to_str())
        # The template and the decoder do not change ids, and are left out.
        content = {part: spec[part] for part in ("normalizer", "pre_tokenizer")}
        # one writer leaves an empty field out, another writes it as null or ""
        content["model"] = {key: value for key, value in spec["model"].items() if value}
        content["added_tokens"] = [[token["id"], token["content"], token["special"]] for token in spec["added_tokens"]]
        content["special"] = asdict(self.special)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def pair(self) -> PairTemplate:
        """The special tokens of a pair of texts. Raises ``DataError`` where its template cannot be used."""
        with rust_errors("tokenizer", "a pair cannot be encoded"):
            return pair_template(self.backend)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without special tokens around it; the text of a special token is read as text.

        Uses all cores (``RAYON_NUM_THREADS`` limits them; in a forked process, one).
        """
        with rust_errors("tokenizer", "a text cannot be encoded"):
            return [
                np.asarray(encoding.ids, dtype=np.int32)
                for batch in _by_size(texts)
                for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False)
            ]

    def encode_framed(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """The ids of ``<s> text </s>`` for each text, which is cut so that these are at most ``length``."""
        room = length - 2
        return [[self.special.bos, *ids[:room].tolist(), self.special.eos] for ids in self.encode_batch(texts)]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``, with special tokens left out or written as they are named."""
        with rust_errors("tokenizer", "ids cannot be decoded"):
            return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def save(self, out: Path, *, model_max_length: int | None = None, types: bool = True) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into the folder ``out``, other files stay.

        ``transformers.AutoTokenizer.from_pretrained(out)`` then gives our ids. The class is ``PreTrainedTokenizerFast``
        for every kind, the only one that takes the pipeline from the file; ``RobertaTokenizer``, or no class, rebuilds
        a pipeline of its own, without an error. With ``types=False`` it gives no token types, for a model with one
        segment: RoBERTa has no row for the second text of a pair of BERT's kind.
        """
        bos, pad, eos, unk, mask = (self.backend.id_to_token(i) for i in asdict(self.special).values())
        # A model with one segment gets no token types: it has no row for the second one.
        inputs = ["token_type_ids"] if types and 1 in self.backend.encode("a", "b").type_ids else []
        # Special tokens without a role, which `load_tokenizer` must not look for in texts.
        added = self.backend.get_added_tokens_decoder().values()
        controls = [t.content for t in added if t.special and t.content not in (bos, pad, eos, unk, mask)]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model_max_length or self.model_max_length,
            "bos_token": bos,
            "cls_token": bos,
            "pad_token": pad,
            "eos_token": eos,
            "sep_token": eos,
            "unk_token": unk,
            "mask_token": mask,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", *inputs, "attention_mask"],
            **({"control_symbols": controls} if controls else {}),
        }
        with new_file(out / "tokenizer.json") as file:
            file.write(self.backend.to_str(pretty=True))
        with new_file(out / "tokenizer_config.json") as file:
            file.write(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def require_short_prompt(prompt: str, room: int, what: str, remedy: str = "shorten it") -> None:
    """Refuse a prompt that ``room`` tokens cannot hold, by its characters: it is not tokenized, which takes gigabytes.

    Raises:
        ConfigError: it is longer.
    """
    longest = room * _TOKEN_CHARACTERS if room else _PROMPT_CHARACTERS
    if len(prompt) > longest:
        holds = f"which {room:,} tokens do not hold" if room else f"and may have {longest:,}"
        raise ConfigError(f"{what}: the prompt {shown(prompt, 60)} has {len(prompt):,} characters, {holds}; {remedy}")


def load_tokenizer(path: Path, *, add_missing: bool = False) -> TextTokenizer:
    """Load a tokenizer folder: ``tokenizer.json``, or ``vocab.json`` + ``merges.txt``, or ``vocab.txt``.

    The first is what this package and Hugging Face write, the second GPT-2's and RoBERTa's byte-level BPE, the third
    BERT's WordPiece. Special tokens are those of ``tokenizer_config.json`` and ``special_tokens_map.json``, otherwise
    known by their usual names. ``add_missing`` appends those that the vocabulary lacks (GPT-2 has no mask or pad) at
    its end; ids that exist do not move.

    Raises:
        DataError: the folder is missing, holds no tokenizer, a damaged one, or one that lacks a special token.
    """
    opened = open_folder(path)
    with rust_errors(path, "damaged tokenizer"):
        # Special tokens may be appended here, so the ids are checked afterwards.
        special = resolve_special_ids(opened.tokenizer, opened.declared, path, add_missing=add_missing)
        check_ids(opened.tokenizer, path)
    return TextTokenizer(opened.tokenizer, special, model_max_length=opened.model_max_length)


def _by_size(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield groups of limited size: the library holds some 100 bytes per token until a group is done."""
    group: list[str] = []
    characters = 0
    for text in texts:
        if group and characters + len(text) > _BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(text)
        characters += len(text)
    if group:
        yield group
