"""Train a SentencePiece tokenizer on a stream of texts and leave a folder that every other part of the system reads."""

from __future__ import annotations

import io
import logging
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sentencepiece import SentencePieceNormalizer, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import normalizers

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import ConfigError, DataError, UserError
from capt.tokenizer.check import LINES
from capt.tokenizer.export import write_folder
from capt.tokenizer.pieces import TRAINED_HERE, unicode_steps
from capt.tokenizer.special import TRAINED

logger = logging.getLogger(__name__)

Kind = Literal["unigram", "bpe"]
Normalization = Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"]

_SENTENCE_BYTES = 1024
_LONGEST_NORMALIZED = 16 * _SENTENCE_BYTES
"""NFKC writes a character of three bytes with up to 33."""
_PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_SCORE_STEP = 2.0**-9
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True)
class TrainReport:
    """The numbers of a finished training."""

    vocab_size: int
    lines: int
    """Lines of text in the corpus that are not blank."""
    sentences: int
    """Number of sentences after long lines were cut."""
    used: int
    """Sentences that the vocabulary was trained on."""
    checked: int
    """Lines whose normalised text gave the same ids from SentencePiece and from the exported ``tokenizer.json``."""
    seconds: float


def train(
    texts: Iterable[str],
    out: Path,
    *,
    vocab_size: int,
    type: Kind = "unigram",
    byte_fallback: bool = True,
    character_coverage: float = 0.9995,
    normalization: Normalization = "nmt_nfkc",
    model_max_length: int = 512,
    max_sentences: int = 500_000,
    seed: int = 0,
    threads: int = 16,
) -> TrainReport:
    """Train on ``texts`` and write ``out``: ``sentencepiece.model``, ``tokenizer.json``, ``tokenizer_config.json``.

    ``normalization`` is a rule of SentencePiece: NFKC, with ``nmt`` also control characters and kinds of spaces, with
    ``cf`` also case. The steps of ``tokenizer.json`` apply it, once, before the training as in use;
    ``sentencepiece.model`` by itself differs for combining marks in another order than Unicode's.

    Ids are ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, ``<mask>`` 4, with ``byte_fallback`` 256 bytes (so that
    nothing is unknown), then pieces. Kudo 2018 (unigram), Sennrich et al. 2016 (BPE), as SentencePiece trains them.

    ``texts`` is read once. A text is cut at line ends, and a line over 1,024 bytes at a space (SentencePiece itself
    drops long lines). Of more than ``max_sentences`` such sentences a uniform sample by ``seed`` is used. Memory: about
    20 bytes for a byte of the sample with unigram, 5 with BPE.

    The result is the same on every machine for the same texts and arguments. ``threads`` is one of these for unigram,
    whose scores depend on it in their last digits; it need not be the number of cores.

    Raises:
        ConfigError: an argument is out of range; ``vocab_size`` is too small for the characters of the corpus.
        DataError: the corpus is empty, or too small for ``vocab_size`` (the message says what would fit); ``out`` holds
            something; the export gives other ids than SentencePiece. Nothing is left behind.
    """
    _validate(vocab_size, type, normalization, character_coverage, model_max_length, max_sentences, threads)
    started = time.monotonic()
    with new_folder(out) as folder:
        # A text is read once, so the sample is drawn while it goes by.
        sample = _Sample(max_sentences, random.Random(seed))
        for text in texts:
            sample.add(text)
        sentences = sample.sentences()
        if not sentences:
            raise DataError("the corpus to train a tokenizer on has no text in it")
        logger.info(
            "tokenizer: training %s with %d pieces on %d of %d sentences (lines of text: %d; the long ones are cut)",
            *(type, vocab_size, len(sentences), sample.seen, sample.lines),
        )
        try:
            spec = _normalizer_spec(normalization)
            rule = normalizers.Sequence(unicode_steps(spec))
            model = _fit(
                # Normalised by the steps of the export, so that the vocabulary has what the export sees.
                (rule.normalize_str(sentence) for sentence in sentences),
                spec.name,
                model_type=type,
                vocab_size=vocab_size,
                byte_fallback=byte_fallback,
                character_coverage=character_coverage,
                normalization_rule_name=normalization,
                num_threads=threads,
            )
        except RuntimeError as error:
            raise _explain(error, vocab_size, byte_fallback, len(sentences)) from error
        # Texts of the training itself: what they give must be the same on both sides.
        real = random.Random(seed).sample(sentences, min(2 * LINES, len(sentences)))
        checked = write_folder(model, folder, out, texts=real, model_max_length=model_max_length)
    seconds = round(time.monotonic() - started, 3)
    return TrainReport(vocab_size, sample.lines, sample.seen, len(sentences), checked, seconds)


def _normalizer_spec(normalization: str) -> sentencepiece_model_pb2.NormalizerSpec:
    """The rule of SentencePiece with its character map, under the name by which the export knows its own models."""
    rule = SentencePieceNormalizer(rule_name=normalization).serialized_model_proto()
    spec = sentencepiece_model_pb2.ModelProto.FromString(rule).normalizer_spec
    spec.name = TRAINED_HERE + normalization
    return spec


def _fit(sentences: Iterable[str], normalization: str, **options: Any) -> bytes:
    """The serialised SentencePiece model, its scores (log probabilities) rounded to 1/512.

    Segmentations of equal score are common (45 times ``=`` as 16 + 16 + 13 in any order). Of those, SentencePiece and
    ``tokenizers`` both take the first, but SentencePiece adds in float32, where sums of other order come out unequal.
    Rounded, they are exact up to 2^15 nats, some thousand pieces.
    """
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        bos_piece=TRAINED["bos"],
        pad_piece=TRAINED["pad"],
        eos_piece=TRAINED["eos"],
        unk_piece=TRAINED["unk"],
        control_symbols=[TRAINED["mask"]],
        required_chars=_PRINTABLE_ASCII,  # "</s>" in a text must be spelt, never be an unknown
        max_sentence_length=_LONGEST_NORMALIZED,
        minloglevel=2,
        **options,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    for piece in proto.pieces:
        piece.score = round(piece.score / _SCORE_STEP) * _SCORE_STEP
    proto.normalizer_spec.name = normalization
    return bytes(proto.SerializeToString(deterministic=True))


class _Sample:
    """A uniform sample of at most ``size`` sentences from a stream (algorithm R), kept in the order of the stream."""

    def __init__(self, size: int, generator: random.Random) -> None:
        self.size = size
        self.generator = generator
        self.lines = 0
        self.seen = 0
        self._kept: list[tuple[int, str]] = []

    def add(self, text: str) -> None:
        # Nothing else ends a line: str.splitlines cuts at U+2028 and ten other characters.
        for line in re.split(r"\r?\n", text):
            if not line or line.isspace():
                continue
            self.lines += 1
            try:
                sentences = _cut(line, _SENTENCE_BYTES)
            except UnicodeEncodeError as error:
                raise DataError(f"line {self.lines} of the corpus is not valid Unicode ({error.reason})") from error
            for sentence in sentences:
                # Algorithm R: sentence n replaces one of the sample with probability size / n.
                place = self.seen if self.seen < self.size else self.generator.randrange(self.seen + 1)
                if place < len(self._kept):
                    # With its number in the stream, by which the sample is sorted at the end.
                    self._kept[place] = (self.seen, sentence)
                elif place < self.size:
                    self._kept.append((self.seen, sentence))
                self.seen += 1

    def sentences(self) -> list[str]:
        return [sentence for _, sentence in sorted(self._kept)]


def _cut(line: str, limit: int) -> list[str]:
    """Cut ``line`` into parts of at most ``limit`` bytes, at spaces, or within a word that is longer than that."""
    parts = []
    data = line.encode()
    while len(data) > limit:
        # From the second byte on, or the part would be empty.
        end = data.rfind(b" ", 1, limit + 1)
        if end < 0:
            end = len(data[:limit].decode(errors="ignore").encode())  # not within a character
        parts.append(data[:end].decode())
        data = data[end:].lstrip(b" ")
    return [*parts, data.decode()] if data else parts


def _validate(
    vocab_size: int,
    type: str,
    normalization: str,
    character_coverage: float,
    model_max_length: int,
    max_sentences: int,
    threads: int,
) -> None:
    if type not in get_args(Kind):
        raise ConfigError(f"tokenizer type {type!r} is not known; choose one of {', '.join(get_args(Kind))}")
    if normalization not in get_args(Normalization):
        choices = ", ".join(get_args(Normalization))
        raise ConfigError(f"tokenizer normalization {normalization!r} is not known; choose one of {choices}")
    if not 0.98 <= character_coverage <= 1.0:
        raise ConfigError(f"character_coverage is {character_coverage}; it is a share of all characters, 0.98 to 1")
    for name, value in (
        ("vocab_size", vocab_size),
        ("model_max_length", model_max_length),
        ("max_sentences", max_sentences),
        ("threads", threads),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")


def _explain(error: RuntimeError, vocab_size: int, byte_fallback: bool, sentences: int) -> UserError:
    text = str(error)
    if match := _TOO_LARGE.search(text):
        return DataError(
            f"the corpus ({sentences} sentences) has too little text for vocab_size={vocab_size} "
            f"(tokenizer.vocab_size of a job, --vocab-size of a command); the largest that works is {match[1]}"
        )
    if match := _TOO_SMALL.search(text):
        parts = "5 special tokens, printable ASCII and the corpus's characters" + ", 256 bytes" * byte_fallback
        return ConfigError(f"vocab_size={vocab_size} is too small for {parts}; it must be at least {match[1]}")
    return DataError(f"SentencePiece could not train a tokenizer on this corpus: {text.splitlines()[0]}")
