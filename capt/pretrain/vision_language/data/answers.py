"""Answers as classes: tables of answers, how answers are normalised, and VQA's soft scores."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.files import is_utf8, write_json
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import read_document

# How VQA's official evaluator normalises answers, with its quirks: other normalisers score some answers otherwise.
#
# Written from the behaviour of ``vqaEval.py`` of https://github.com/GT-Vision-Lab/VQA (commit a013f00).


_ARTICLES = {"a", "an", "the"}
_NUMBERS = dict(
    zip(
        ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
        map(str, (0, *range(11))),
        strict=True,
    )
)
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32
"""The evaluator passes a flag (of value 32) where the number of replacements belongs."""

_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't "
    "he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've "
    "must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't "
    "shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's "
    "something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've "
    "they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's "
    "where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't "
    "wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've"
)


def _without_one_apostrophe(word: str) -> list[str]:
    return [word[:i] + word[i + 1 :] for i, letter in enumerate(word) if letter == "'"]


_MENDED = {wrong: word for word in _CONTRACTIONS.split() for wrong in _without_one_apostrophe(word)}
_MENDED["somebody'd"] = "somebodyd"


def strip_punctuation(text: str) -> str:
    """Punctuation removed where it is next to a blank, or anywhere if a comma is between two digits somewhere.

    Elsewhere it becomes a blank: ``t-shirt`` is ``t shirt``, ``yes, sir`` is ``yes sir``. What decides is the text
    as given. Then the first 32 periods go that no digit follows.
    """
    stripped = text
    has_thousands = _COMMA.search(text) is not None
    for mark in _PUNCTUATION:
        beside_blank = f"{mark} " in text or f" {mark}" in text
        stripped = stripped.replace(mark, "" if beside_blank or has_thousands else " ")
    return _PERIOD.sub("", stripped, count=_MOST_PERIODS)


def plain_words(text: str) -> str:
    """Words in lower case, without articles, ``none`` and ``zero`` to ``ten`` as digits, apostrophes put back."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_MENDED.get(word, word) for word in words if word not in _ARTICLES)


def normalise(text: str) -> str:
    """`strip_punctuation`, then `plain_words`: what the evaluator makes of both answers before it compares them."""
    return plain_words(strip_punctuation(text))


def normalise_answer(text: str) -> str:
    """An answer as the official vocabulary has it: `normalise`, and then without the commas that are left."""
    return normalise(text).replace(",", "")


__all__ = ["AnswerTable", "Coverage", "build_table", "convert_ans", "coverage", "load_table", "normalise_answer"]
__all__ += ["vqa_soft_score"]

logger = logging.getLogger(__name__)

_MOST = 1 << 20
_LONGEST = 1 << 12

Convert = Callable[[str], str]


@dataclass(frozen=True)
class AnswerTable:
    """The answers that are classes, in the order of their classes.

    ``index`` is the class of each answer. Raises ``DataError`` for an answer that occurs twice.
    """

    answers: tuple[str, ...]
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {answer: i for i, answer in enumerate(self.answers)}
        if len(index) < len(self.answers):
            twice = next(answer for i, answer in enumerate(self.answers) if index[answer] != i)
            raise DataError(f"the answer {shown(twice)} occurs twice; a table has each answer once")
        object.__setattr__(self, "index", index)

    def __len__(self) -> int:
        return len(self.answers)

    def scores(self, answers: Mapping[str, float], convert: Convert | None = None) -> dict[int, float]:
        """The score of each class among ``answers``; answers that are no class are left out.

        Args:
            answers: with their scores.
            convert: applied to each answer before it is looked up, such as `convert_ans`. Of several answers that
                become the same one, the highest score counts.
        """
        found: dict[int, float] = {}
        for answer, score in answers.items():
            at = self.index.get(answer if convert is None else convert(answer))
            if at is not None:
                found[at] = max(score, found.get(at, 0.0))
        return found

    def save(self, path: Path) -> None:
        """Write the table as a JSON list, as `load_table` reads it."""
        write_json(path, list(self.answers))


def load_table(path: Path) -> AnswerTable:
    """Read a table: LXMERT's ``all_ans.json``, a ``label2ans`` list or an ``ans2label`` object, also packed (.gz).

    Raises:
        DataError: the file is none of these, an answer occurs twice, or its classes are not 0, 1, 2, ...
    """
    document = read_document(path)
    if document.table:
        answers: list[Any] = [*_by_class(path, document.table)]
    else:
        answers = [row.get("ans") if isinstance(row, dict) else row for row in document.rows]
    if document.lines is not None or len(answers) > _MOST:
        raise DataError(f"{path}: not a table of answers: give a JSON list of at most {_MOST:,} answers")
    for i, answer in enumerate(answers):
        if not isinstance(answer, str) or len(answer) > _LONGEST or not is_utf8(answer):
            raise DataError(f"{path}: answer {i}: {shown(answer)} is not a text of at most {_LONGEST:,} characters")
    try:
        return AnswerTable(tuple(answers))
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from None


def _by_class(path: Path, table: dict[str, Any]) -> list[str]:
    classes = list(table.values())
    if not all(type(number) is int for number in classes) or set(classes) != set(range(len(table))):
        raise DataError(f"{path}: the classes of its {len(table):,} answers are not the numbers 0 to {len(table) - 1}")
    return sorted(table, key=table.__getitem__)


def build_table(examples: Iterable[Example], minimum_count: int) -> AnswerTable:
    """The answers that at least ``minimum_count`` questions have, most frequent first, then by alphabet.

    A question counts for one answer: for `Example.answer` where it has one (VQA's normalised
    ``multiple_choice_answer``), else for the first of the best in `Example.answers`. With 9 and VQA v2's training and
    validation sets these are the 3,129 answers that everybody uses.

    Raises:
        DataError: no answer is so frequent.
    """
    counts = Counter(answer for example in examples if (answer := _counted(example)) is not None)
    frequent = [answer for answer, count in counts.items() if count >= minimum_count]
    if not frequent:
        most = f"the most frequent is {shown(max(counts, key=lambda answer: counts[answer]))}" if counts else "there is"
        remedy = "set data.minimum_answers lower, or name a table in data.answers"
        if not counts:
            remedy = "the files hold no questions with answers: a pretraining job without them has objectives.answers=0"
        raise DataError(
            f"no answer occurs with {counted(minimum_count, 'question')} ({most}{'' if counts else ' none at all'}); "
            f"{remedy}"
        )
    return AnswerTable(tuple(sorted(frequent, key=lambda answer: (-counts[answer], answer))))


def _counted(example: Example) -> str | None:
    if example.answer is not None:
        return example.answer
    answers = example.answers
    return max(answers, key=answers.__getitem__) if answers else None


class Coverage(NamedTuple):
    """The number of answers of a data set that a table has.

    Attributes:
        questions: that have answers, or would have if they were in the table.
        uncovered: those of which no answer is in the table.
        answers: of all questions.
        outside: those that are not in the table.
    """

    questions: int
    uncovered: int
    answers: int
    outside: int


def coverage(examples: Iterable[Example], table: AnswerTable, convert: Convert | None = None) -> Coverage:
    """Count the answers outside ``table`` and the questions without any inside; ``convert`` as `AnswerTable.scores`."""
    questions = uncovered = answers = outside = 0
    for example in examples:
        if example.answers is None:
            continue
        inside = sum((answer if convert is None else convert(answer)) in table.index for answer in example.answers)
        questions += 1
        uncovered += not inside
        answers += len(example.answers)
        outside += len(example.answers) - inside
    return Coverage(questions, uncovered, answers, outside)


def log_coverage(source: str, found: Coverage, table: AnswerTable) -> None:
    """Say once how many answers of ``source`` are outside the table; nothing where all are inside."""
    if found.outside or found.uncovered:
        logger.warning(
            "%s: %s of %s answers are not among the %s of the table; %s of %s have none that is",
            *(source, f"{found.outside:,}", f"{found.answers:,}", f"{len(table):,}"),
            *(f"{found.uncovered:,}", counted(found.questions, "question")),
        )


_CONVERTED = dict(
    zip(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), range(1, 11), strict=True)
)


def convert_ans(answer: str) -> str:
    """An answer as LXMERT's pretraining table of 9,500 has it.

    Lower case; a period at the end goes; then "a ", "an " and "the " at the beginning, one after the other; ``one`` to
    ``ten`` become digits, and ``grey`` becomes ``gray``.
    """
    answer = answer.lower()
    if answer.endswith("."):
        answer = answer[:-1].strip()
    for article in ("a ", "an ", "the "):
        if answer.startswith(article):
            answer = answer[len(article) :].strip()
    if answer == "grey":
        return "gray"
    return str(_CONVERTED.get(answer, answer))


def vqa_soft_score(count: int, annotators: int = 10) -> float:
    """The official accuracy of an answer that ``count`` of ``annotators`` gave.

    Each annotator in turn is left out, and the answer scores ``min(1, matches / 3)`` among the others; the mean of
    these. For ten annotators 0, 0.3, 0.6, 0.9 and, from four on, 1. Not ``min(1, count / 3)``, which differs for one to
    three.

    Raises:
        ValueError: ``count`` is not between 0 and ``annotators``.
    """
    if not 0 <= count <= annotators or not annotators:
        raise ValueError(f"{count} of {annotators} annotators")
    thirds = count * min(3, count - 1) + (annotators - count) * min(3, count)
    return max(thirds, 0) / (3 * annotators)
