"""A SentencePiece model as a ``tokenizers`` pipeline of the same ids.

The conversion follows what SentencePiece does with a text, step by step:

1. its character map (NFKC and friends), after a Unicode form (`unicode_steps`), because the ``tokenizers`` library
   looks a character map up by grapheme and would leave decomposed Hangul and Vietnamese as they are;
2. runs of spaces become one, spaces at the ends go, one space is put before the text (``▁`` represents a space);
3. unigram: the pieces of highest summed score; BPE: merges in the order of their scores, whatever two pieces they join.

Control pieces (``<s>``, ``<mask>``), byte pieces and the unknown piece never match text in SentencePiece. The unigram
model of ``tokenizers`` would match them, so they get a score that no text prefers.

A model of `train` is trained on text that `unicode_steps` has normalised, so its vocabulary has what its export sees.
In a model from elsewhere a combining mark that follows a character which the character map replaces (``½`` + U+0301)
may get other ids. In a unigram model from elsewhere, which of several segmentations of equal score is taken depends on
float32 rounding (``00000`` as ``0 00 00`` or ``00 0 00``, one line in some thousand); `train` rounds its scores so that
this does not happen.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import read_bytes
from capt.tokenizer.special import NEVER_IN_TEXT

_UNIGRAM, _BPE = 1, 2
_NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_LONGEST_PIECE = 512
"""Characters that SentencePiece's trainer allows: every cut of a piece is looked at."""
TRAINED_HERE = "capt_"
"""Begins the name of the normalization of a model of `train`, whose text is normalised before SentencePiece gets it."""


def read_model(path: Path) -> sentencepiece_model_pb2.ModelProto:
    """Read a ``.model`` file. Raises ``DataError`` for anything else."""
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(read_bytes(path))
    except DecodeError:
        raise DataError(f"{path}: not a SentencePiece model") from None
    if not proto.pieces or not 0 <= proto.trainer_spec.unk_id < len(proto.pieces):
        raise DataError(f"{path}: not a SentencePiece model (it has no pieces)")
    return proto


def to_tokenizer(proto: sentencepiece_model_pb2.ModelProto, where: Path, *, marks_as_typed: bool = False) -> Tokenizer:
    """The ``tokenizers`` counterpart of a SentencePiece model: the same ids, all control pieces as special tokens.

    ``marks_as_typed`` is for a model from elsewhere: see `unicode_steps`.

    Raises:
        DataError: the model is neither unigram nor BPE, or uses a setting that has no counterpart.
    """
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    # SentencePiece merges such characters all the same, and an unknown piece costs it less.
    absent = _characters_without_piece(proto)
    # Settings that change ids and have no step in `tokenizers`; each is refused by its name.
    unsupported = {
        f"model type {trainer.ModelType.Name(trainer.model_type)}": trainer.model_type not in (_UNIGRAM, _BPE),
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "add_dummy_prefix=false": not normalizer.add_dummy_prefix,
        "remove_extra_whitespaces=false": not normalizer.remove_extra_whitespaces,
        "escape_whitespaces=false": not normalizer.escape_whitespaces,
        "user-defined symbols in a BPE model": trainer.model_type == _BPE
        and any(piece.type == USER_DEFINED and len(piece.piece) > 1 for piece in proto.pieces),
        # SentencePiece merges over them and divides the result again.
        "unused pieces in a BPE model": trainer.model_type == _BPE
        and any(piece.type == _UNUSED for piece in proto.pieces),
        f"pieces of characters that have no piece ({shown(absent)})": trainer.model_type in (_UNIGRAM, _BPE)
        and bool(absent),
    }
    used_features = [name for name, used in unsupported.items() if used]
    if used_features:
        raise DataError(
            f"{where}: {', '.join(used_features)} cannot be exported exactly; use a unigram or BPE model without"
        )
    tokenizer = Tokenizer(_unigram(proto) if trainer.model_type == _UNIGRAM else _bpe(proto, where))
    tokenizer.normalizer = _normalizer(normalizer, unicode_steps(normalizer, marks_as_typed=marks_as_typed))
    # Words can be segmented one by one, and cached, unless a piece reaches over a space.
    split = not any("▁" in piece.piece[1:] for piece in proto.pieces if piece.type == _NORMAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=split)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="first"), decoders.Fuse()]
    )
    control = [piece.piece for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True, lstrip=piece == "<mask>") for piece in control]
    )
    return tokenizer


def _characters_without_piece(proto: sentencepiece_model_pb2.ModelProto) -> str:
    """The first characters of usual pieces that are no piece by themselves, as in a vocabulary that was cut down."""
    single = {piece.piece for piece in proto.pieces if piece.type in (_NORMAL, USER_DEFINED)}
    held = {character for piece in proto.pieces if piece.type == _NORMAL for character in piece.piece}
    return "".join(sorted(held - single)[:5])


def unicode_steps(
    spec: sentencepiece_model_pb2.NormalizerSpec, *, marks_as_typed: bool = False
) -> list[normalizers.Normalizer]:
    """The steps that change characters: a Unicode form, then the character map of the model.

    A model of `train` has NFKC as its form. A model from elsewhere has NFC, which composes what the character map of
    SentencePiece composes, but also sorts the marks of a letter (Hebrew, Arabic). With ``marks_as_typed`` it has none.
    """
    if not spec.precompiled_charsmap:
        return []
    form: list[normalizers.Normalizer] = []
    if spec.name.startswith(TRAINED_HERE):
        form = [normalizers.NFKC()]
        if spec.name.endswith("_cf"):
            # the character map loses a mark that follows a letter which it replaces: leave it no capitals
            form += [normalizers.Lowercase()]
    elif "nfkc" in spec.name and not marks_as_typed:
        form = [normalizers.NFC()]
    return [*form, normalizers.Precompiled(spec.precompiled_charsmap)]


def _normalizer(
    spec: sentencepiece_model_pb2.NormalizerSpec, unicode: list[normalizers.Normalizer]
) -> normalizers.Normalizer:
    # Runs of spaces become one, and those at the end go; Metaspace puts the one before the text.
    steps = [*unicode, normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"[ ▁]+\z"), "")]
    if "nmt" not in spec.name:
        # the nmt rules turn a literal ▁ into a space; elsewhere a text that begins with one still gets its prefix
        steps += [normalizers.Replace(Regex(r"\A ?▁"), "▁▁")]
    return normalizers.Sequence(steps)


def _unigram(proto: sentencepiece_model_pb2.ModelProto) -> models.Unigram:
    best = max((piece.score for piece in proto.pieces if piece.type == _NORMAL), default=0.0)

    def score(piece: sentencepiece_model_pb2.ModelProto.SentencePiece) -> float:
        if piece.type == USER_DEFINED:  # preferred to any other segmentation: unigram_model.cc
            return float(len(piece.piece.encode()) * best - 0.1)
        return float(piece.score) if piece.type == _NORMAL else NEVER_IN_TEXT

    return models.Unigram(
        [(piece.piece, score(piece)) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _bpe(proto: sentencepiece_model_pb2.ModelProto, where: Path) -> models.BPE:
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    if longest := next((piece for piece in ids if len(piece) > _LONGEST_PIECE), None):
        raise DataError(
            f"{where}: the piece {shown(longest)} has {len(longest):,} characters; SentencePiece makes none over "
            f"{_LONGEST_PIECE}: fetch the file again"
        )
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, USER_DEFINED)}
    # Every way to make a piece of two others, in the order of the scores: SentencePiece merges by the result alone.
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
