"""A SentencePiece model as a ``tokenizer.json`` that gives the same ids, or an error.

The conversion follows what SentencePiece does with a text, step by step:

1. its character map (NFKC and friends), after NFC, because the ``tokenizers`` library looks a character map up by
   grapheme and would leave decomposed Hangul and Vietnamese as they are;
2. runs of spaces become one, spaces at the ends go, one space is put before the text (``▁`` stands for a space);
3. unigram: the pieces of highest summed score; BPE: merges in the order of their scores, whatever two pieces they join.

Control pieces (``<s>``, ``<mask>``), byte pieces and the unknown piece never match text in SentencePiece. The unigram
model of ``tokenizers`` would match them, so they get a score that no text prefers.

What differs still is a combining mark that follows a character which the character map replaces (``½`` + U+0301), and
marks in an order that Unicode does not produce; models with ``normalization="identity"`` have neither. In a unigram
model from elsewhere, which of several segmentations of equal score is taken depends on float32 rounding (``00000`` as
``0 00 00`` or ``00 0 00``, one line in some thousand); `train` rounds its scores so that this does not happen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenizer.check import LINES, check_round_trip, check_with_transformers
from tokenizer.encode import TextTokenizer
from tokenizer.errors import DataError
from tokenizer.files import new_folder
from tokenizer.formats import NEVER_IN_TEXT
from tokenizer.special import resolve

logger = logging.getLogger(__name__)

MODEL_FILE = "sentencepiece.model"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def export(
    source: Path,
    out: Path,
    *,
    texts: Iterable[str] = (),
    model_max_length: int = 512,
    add_missing: bool = False,
) -> int:
    """Write the SentencePiece model ``source`` (a ``.model`` file, or the folder that holds it) as a tokenizer folder.

    The folder gets ``sentencepiece.model``, ``tokenizer.json``, ``tokenizer_config.json``; ids are SentencePiece's own
    (fairseq's XLM-R shifts them by one: use its ``tokenizer.json`` instead). Returns the number of texts whose ids were
    compared with SentencePiece: ``texts``, awkward ones, and 1,000 of random pieces of the model. Ties of a unigram
    model pass with a warning. The folder is then loaded with ``transformers``, which must give the same ids as well on
    the first 2,000 of ``texts``.

    Raises:
        DataError: ``source`` is not a SentencePiece model, is of a kind that has no exact counterpart, lacks a special
            token (``add_missing`` appends it), or a line gets other ids than from SentencePiece. Nothing is written.
    """
    path = _model_file(source)
    with new_folder(out) as folder:
        lines = iter(texts)
        first = list(islice(lines, 2 * LINES))
        compared = write_folder(
            path.read_bytes(),
            folder,
            path,
            texts=chain(first, lines),
            model_max_length=model_max_length,
            add_missing=add_missing,
            allow_ties=True,
        )
        check_with_transformers(folder, first)
    return compared


def write_folder(
    model: bytes,
    folder: Path,
    where: Path,
    *,
    texts: Iterable[str],
    model_max_length: int,
    add_missing: bool = False,
    allow_ties: bool = False,
) -> int:
    """Write the serialised ``model`` and its checked export into ``folder``; ``where`` names it in errors."""
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{where}: not a SentencePiece model ({error})") from error
    if processor.get_piece_size() == 0:
        raise DataError(f"{where}: not a SentencePiece model (it has no pieces)")
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    tokenizer = to_tokenizer(proto, where)
    spec = proto.trainer_spec
    ids = {"bos": spec.bos_id, "pad": spec.pad_id, "eos": spec.eos_id, "unk": spec.unk_id}
    reserved = {i: piece.piece for i, piece in enumerate(proto.pieces) if piece.type in (_UNKNOWN, _CONTROL)}
    declared = {role: reserved[i] for role, i in ids.items() if i in reserved}
    special = resolve(tokenizer, declared, where, add_missing=add_missing)
    text_tokenizer = TextTokenizer(tokenizer, special, model_max_length=model_max_length)
    lines = check_round_trip(text_tokenizer, processor, texts, where, allow_ties=allow_ties)
    (folder / MODEL_FILE).write_bytes(model)
    text_tokenizer.save(folder)
    logger.info("%s: %d pieces exported; %d lines have SentencePiece's ids", where, len(proto.pieces), lines)
    return lines


def to_tokenizer(proto: sentencepiece_model_pb2.ModelProto, where: Path) -> Tokenizer:
    """The ``tokenizers`` counterpart of a SentencePiece model: the same ids, all control pieces as special tokens.

    Raises:
        DataError: the model is neither unigram nor BPE, or uses a setting that has no counterpart.
    """
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    unsupported = {
        f"model type {trainer.ModelType.Name(trainer.model_type)}": trainer.model_type not in (_UNIGRAM, _BPE),
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "add_dummy_prefix=false": not normalizer.add_dummy_prefix,
        "remove_extra_whitespaces=false": not normalizer.remove_extra_whitespaces,
        "escape_whitespaces=false": not normalizer.escape_whitespaces,
        "user-defined symbols in a BPE model": trainer.model_type == _BPE
        and any(piece.type == _USER_DEFINED and len(piece.piece) > 1 for piece in proto.pieces),
    }
    found = [name for name, used in unsupported.items() if used]
    if found:
        raise DataError(f"{where}: {', '.join(found)} cannot be exported exactly; use a unigram or BPE model without")
    tokenizer = Tokenizer(_unigram(proto) if trainer.model_type == _UNIGRAM else _bpe(proto))
    tokenizer.normalizer = _normalizer(normalizer)
    # Words can be segmented one by one, and cached, unless a piece reaches over a space.
    split = not any("▁" in piece.piece[1:] for piece in proto.pieces if piece.type == _NORMAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=split)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="first"), decoders.Fuse()]
    )
    control = [piece.piece for piece in proto.pieces if piece.type == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True, lstrip=piece == "<mask>") for piece in control]
    )
    return tokenizer


def _normalizer(spec: sentencepiece_model_pb2.NormalizerSpec) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps += [normalizers.NFC()] if "nfkc" in spec.name else []
        steps += [normalizers.Precompiled(spec.precompiled_charsmap)]
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"[ ▁]+\z"), "")]
    if "nmt" not in spec.name:
        # the nmt rules turn a literal ▁ into a space; elsewhere a text that begins with one still gets its prefix
        steps += [normalizers.Replace(Regex(r"\A ?▁"), "▁▁")]
    return normalizers.Sequence(steps)


def _unigram(proto: sentencepiece_model_pb2.ModelProto) -> models.Unigram:
    best = max((piece.score for piece in proto.pieces if piece.type == _NORMAL), default=0.0)

    def score(piece: sentencepiece_model_pb2.ModelProto.SentencePiece) -> float:
        if piece.type == _USER_DEFINED:  # preferred to any other segmentation: unigram_model.cc
            return float(len(piece.piece.encode()) * best - 0.1)
        return float(piece.score) if piece.type == _NORMAL else NEVER_IN_TEXT

    return models.Unigram(
        [(piece.piece, score(piece)) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _bpe(proto: sentencepiece_model_pb2.ModelProto) -> models.BPE:
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return models.BPE(
        ids,
        [(proto.pieces[left].piece, proto.pieces[right].piece) for _, left, right in sorted(merges)],
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _model_file(source: Path) -> Path:
    if source.is_file():
        return source
    found = sorted(source.glob("*.model")) if source.is_dir() else []
    if len(found) != 1:
        what = f"{len(found)} .model files" if source.is_dir() else "no such file"
        raise DataError(f"{source}: {what}; give one SentencePiece .model file, or a folder with exactly one")
    return found[0]
