"""Read examples from files of any known form, recognised by its content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.records import Record
from capt.pretrain.vision_language.data import captions, gqa, vqa
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, Text, Unique, read_document


class _OfPhotographs(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,]{1,200}-[0-9]+-[0-9]+-[0-9]+$")]
    sentence: Text
    label: Literal["True", "False"] | None = None


def are_of_photographs(document: Document) -> bool:
    """Return whether the rows are NLVR2's official ones (https://github.com/lil-lab/nlvr)."""
    return {"identifier", "sentence"} <= document.keys


def read_photographs(document: Document) -> list[Example]:
    """Read the statements of NLVR2, left picture first: those of ``dev-850-0-0`` are ``dev-850-0-img0`` and ``-img1``.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or an identifier occurs twice.
    """
    unique, examples = Unique("identifier"), []
    for place, row in document.checked(_OfPhotographs):
        unique.add(row.identifier, place)
        pair = row.identifier.rsplit("-", 1)[0]
        truth = None if row.label is None else row.label == "True"
        examples.append(Example(row.identifier, (f"{pair}-img0", f"{pair}-img1"), row.sentence, truth=truth))
    return examples


class _Form(NamedTuple):
    fits: Callable[[Document], bool]
    read: Callable[[Document], list[Example]]
    task: str | None


def _is_numbered(document: Document) -> bool:
    return captions.is_questions(document) and isinstance(document.rows[0].get("question_id"), int)


_FORMS = (
    _Form(captions.is_pretraining, captions.read_pretraining, None),
    _Form(_is_numbered, captions.read_questions, "vqa"),
    _Form(captions.is_questions, captions.read_questions, "gqa"),
    _Form(captions.is_statements, captions.read_statements, "nlvr2"),
    _Form(gqa.is_official, gqa.read_official, "gqa"),
    _Form(are_of_photographs, read_photographs, "nlvr2"),
    _Form(captions.is_annotations, captions.read_annotations, None),
    _Form(captions.is_results, captions.read_results, None),
    _Form(captions.is_own, captions.read_own, None),
    _Form(captions.is_table, captions.read_table, None),
    _Form(captions.is_tokens, captions.read_tokens, None),
)

_KNOWN = (
    "LXMERT's JSON (pretraining, VQA, GQA, NLVR2), VQA v2 questions and annotations, GQA questions, NLVR2 JSON "
    "lines, COCO captions, Flickr8k.token, rows of image and caption (JSON lines, JSON list, CSV or TSV)"
)


def read_examples(paths: Sequence[Path], *, what: str = "data.train") -> list[Example]:
    """Return the examples of all files, in their order.

    The questions of VQA come last. Their annotations are joined by ``question_id``: a list names the files of both.

    Args:
        paths: files, ``.gz`` or plain.
        what: the configuration key that names them.

    Raises:
        DataError: there is no file, a form is unknown, a file is damaged, a row lacks a key or a value is of the wrong
            type, an id occurs twice in the questions or statements of a file, or questions and annotations of VQA do
            not fit. The text names file, row and key.
    """
    return examples_of(read_documents(paths, what=what), what=what)


def read_documents(paths: Sequence[Path], *, what: str = "data.train") -> list[Document]:
    """Parse files. Raises ``DataError`` where there is none, or one is missing or damaged."""
    if not paths:
        raise DataError(f"{what}: no file; name one of {_KNOWN}")
    for path in paths:
        if not path.is_file():
            raise DataError(f"{what}: no file {path}")
    return [read_document(path) for path in paths]


def examples_of(documents: Sequence[Document], *, what: str = "data.train") -> list[Example]:
    """Return the examples (`read_examples`) of files that have been parsed."""
    examples: list[Example] = []
    questions, annotations = [], []
    for document in documents:
        if vqa.is_questions(document):
            questions.append(document)
        elif vqa.is_annotations(document):
            annotations.append(document)
        elif gqa.is_choices(document):  # which the evaluation of GQA alone reads
            continue
        else:
            examples += _form(document).read(document)
    if annotations and not questions:
        raise DataError(f"{what}: {annotations[0].path} holds annotations; name the file of their questions as well")
    # VQA's questions and annotations are joined when all files are read: they may come in any order.
    return examples + vqa.read_questions(questions, annotations)


def task_of(document: Document) -> str | None:
    """Return the task whose questions or statements a file holds; None for captions and pretraining.

    Raises:
        DataError: the form is unknown.
    """
    if vqa.is_questions(document) or vqa.is_annotations(document):
        return "vqa"
    if gqa.is_choices(document):
        return "gqa"
    return _form(document).task


def _form(document: Document) -> _Form:
    for form in _FORMS:
        if form.fits(document):
            return form
    if document.table or document.keys:
        found = f"its {'first row' if document.rows else 'object'} has {shown(sorted(document.keys)[:8])}"
    else:
        found = f"it begins with {shown(document.rows[0] if document.rows else {})}"
    raise DataError(f"{document.path}: not a known form: {found}; known are {_KNOWN}")
