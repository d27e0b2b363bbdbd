"""A SentencePiece model as a ``tokenizer.json`` that gives the same ids, or an error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import normalizers

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import DataError, quoted, shown
from capt.pretrain.base.files import read_bytes
from capt.tokenizer.check import LINES, agreement, check_round_trip, check_with_transformers
from capt.tokenizer.encode import TextTokenizer
from capt.tokenizer.pieces import CONTROL, TRAINED_HERE, UNKNOWN, USER_DEFINED, to_tokenizer, unicode_steps
from capt.tokenizer.special import ROLE_NAMES, resolve_special_ids

logger = logging.getLogger(__name__)

MODEL_FILE = "sentencepiece.model"

_AS_CONTROL = (
    'python -c "import sys; from sentencepiece import sentencepiece_model_pb2 as pb; '
    "m = pb.ModelProto.FromString(open(sys.argv[1], 'rb').read()); "
    "[setattr(p, 'type', 3) for p in m.pieces if p.type == 4 and p.piece in NAMES]; "
    "open('control.model', 'wb').write(m.SerializeToString())\" FILE"
)
"""The command that makes user-defined symbols control symbols: the same ids for all texts that do not spell them.

The file is an argument, so that somebody else's name is quoted and becomes no code."""


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
    compared with SentencePiece: ``texts``, which should be real lines, and a few awkward ones. The first 2,000 of
    ``texts`` decide whether the export sorts combining marks (`capt.tokenizer.pieces.unicode_steps`). Ties of a unigram
    model pass with a warning. The folder is then loaded with ``transformers``, which must give the same ids as well on
    these 2,000.

    Raises:
        DataError: ``source`` is not a SentencePiece model, is of a kind that has no exact counterpart, lacks a special
            token (``add_missing`` appends it), or a line gets other ids than from SentencePiece. Nothing is written.
    """
    path = _model_file(source)
    with new_folder(out) as folder:
        lines = iter(texts)
        # Twice a batch of the check: enough to see how marks are sorted, and kept in memory.
        first = list(islice(lines, 2 * LINES))
        compared = write_folder(
            read_bytes(path),
            folder,
            path,
            texts=chain(first, lines),
            sample=first,
            model_max_length=model_max_length,
            add_missing=add_missing,
        )
        check_with_transformers(folder, first)
    return compared


def write_folder(
    model: bytes,
    folder: Path,
    where: Path,
    *,
    texts: Iterable[str],
    sample: Sequence[str] = (),
    model_max_length: int,
    add_missing: bool = False,
) -> int:
    """Write the serialised ``model`` and its checked export into ``folder``; ``where`` names it in errors.

    By ``sample`` it is decided whether the export of a model from elsewhere sorts combining marks.
    """
    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{where}: not a SentencePiece model ({error})") from error
    # An empty file is a valid message, of a model without pieces.
    if processor.get_piece_size() == 0:
        raise DataError(f"{where}: not a SentencePiece model (it has no pieces)")
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    if named := [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and piece.piece in ROLE_NAMES]:
        raise DataError(
            f"{where}: {', '.join(map(shown, named))}: user-defined, and so found in texts by SentencePiece, and a "
            "special token here, which no text becomes; train with control_symbols in place of user_defined_symbols, "
            f"or change its type: {_AS_CONTROL.replace('NAMES', repr(named)).replace('FILE', quoted(where.name))}"
        )
    trained = proto.normalizer_spec.name.startswith(TRAINED_HERE)
    spec = proto.trainer_spec
    ids = {"bos": spec.bos_id, "pad": spec.pad_id, "eos": spec.eos_id, "unk": spec.unk_id}
    # Roles are ids in the file of SentencePiece; -1, or the id of a usual piece, is none.
    reserved = {i: piece.piece for i, piece in enumerate(proto.pieces) if piece.type in (UNKNOWN, CONTROL)}
    declared = {role: reserved[i] for role, i in ids.items() if i in reserved}

    def exported(marks_as_typed: bool) -> TextTokenizer:
        tokenizer = to_tokenizer(proto, where, marks_as_typed=marks_as_typed)
        special = resolve_special_ids(tokenizer, declared, where, add_missing=add_missing)
        return TextTokenizer(tokenizer, special, model_max_length=model_max_length)

    # Whether the marks of a letter are sorted (NFC) is not in the file of a model from elsewhere: the sample decides.
    text_tokenizer, as_typed = exported(False), False
    if not trained and (same := agreement(text_tokenizer, processor, sample)) < len(sample):
        other = exported(True)
        if agreement(other, processor, sample) > same:
            text_tokenizer, as_typed = other, True
            logger.info("%s: the export leaves combining marks in the order in which they are typed", where)
    unicode = normalizers.Sequence(unicode_steps(proto.normalizer_spec, marks_as_typed=as_typed))
    # On all texts, before a file of the export is written.
    lines = check_round_trip(text_tokenizer, processor, texts, where, unicode=unicode, trained=trained)
    (folder / MODEL_FILE).write_bytes(model)
    text_tokenizer.save(folder)
    logger.info("%s: %d pieces exported; %d lines have SentencePiece's ids", where, len(proto.pieces), lines)
    return lines


def _model_file(source: Path) -> Path:
    if source.is_file():
        return source
    models = sorted(source.glob("*.model")) if source.is_dir() else []
    if len(models) != 1:
        what = f"{len(models)} .model files" if source.is_dir() else "no such file"
        raise DataError(f"{source}: {what}; give one SentencePiece .model file, or a folder with exactly one")
    return models[0]
