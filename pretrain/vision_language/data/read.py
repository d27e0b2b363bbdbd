"""Read examples from files of any known form; what a file holds tells which form it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.base.errors import DataError, shown
from pretrain.vision_language.data import captions, gqa, lxmert, nlvr1, nlvr2, vqa
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.files import Document, read_document

_READERS: tuple[tuple[Callable[[Document], bool], Callable[[Document], list[Example]]], ...] = (
    (lxmert.is_pretraining, lxmert.read_pretraining),
    (lxmert.is_questions, lxmert.read_questions),
    (lxmert.is_statements, lxmert.read_statements),
    (gqa.is_official, gqa.read_official),
    (nlvr1.is_statements, nlvr1.read_statements),
    (nlvr2.is_statements, nlvr2.read_statements),
    (captions.is_annotations, captions.read_annotations),
    (captions.is_results, captions.read_results),
    (captions.is_tokens, captions.read_tokens),
)

_KNOWN = (
    "LXMERT's JSON (pretraining, VQA, GQA, NLVR2), VQA v2 questions and annotations, GQA questions, NLVR2 or NLVR v1 "
    "JSON lines, COCO captions, Flickr8k.token"
)


def read_examples(paths: Sequence[Path], *, what: str = "data.train") -> list[Example]:
    """The examples of all files, in their order.

    The questions of VQA come last. Their annotations are joined by ``question_id``: a list names the files of both.

    Args:
        paths: files, ``.gz`` or plain.
        what: the configuration key that names them.

    Raises:
        DataError: there is no file, a form is unknown, a file is damaged, a row lacks a key or a value is of the wrong
            type, an id stands twice in the questions or statements of a file, or questions and annotations of VQA do
            not fit. The text names file, row and key.
    """
    if not paths:
        raise DataError(f"{what}: no file; name one of {_KNOWN}")
    examples: list[Example] = []
    questions, annotations = [], []
    for path in paths:
        if not path.is_file():
            raise DataError(f"{what}: no file {path}")
        document = read_document(path)
        if vqa.is_questions(document):
            questions.append(document)
        elif vqa.is_annotations(document):
            annotations.append(document)
        else:
            examples += _reader(document)(document)
    if annotations and not questions:
        raise DataError(f"{what}: {annotations[0].path} holds annotations; name the file of their questions as well")
    return examples + vqa.read_questions(questions, annotations)


def _reader(document: Document) -> Callable[[Document], list[Example]]:
    for fits, read in _READERS:
        if fits(document):
            return read
    if document.table or document.keys:
        found = f"its {'first row' if document.rows else 'object'} has {shown(sorted(document.keys)[:8])}"
    else:
        found = f"it begins with {shown(document.rows[0] if document.rows else {})}"
    raise DataError(f"{document.path}: not a known form: {found}; known are {_KNOWN}")
