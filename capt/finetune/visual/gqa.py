"""GQA: the figures of the official evaluator, and the result file as the server takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.finetune.predictions import write_checked
from capt.finetune.visual.dumps import (
    Checked,
    Figures,
    by_group,
    checked,
    coverage_problems,
    predictions_of,
    read_rows,
    write_rows,
)
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document
from capt.pretrain.vision_language.data.gqa import (
    Choices,
    GqaQuestion,
    gqa_choices,
    gqa_questions,
    is_choices,
    read_gqa_questions,
)

_COMMON = frozenset({"color", "material", "shape"})


def gqa_scores(
    predictions: Mapping[str, str], questions: Sequence[GqaQuestion], choices: Mapping[str, Choices] | None = None
) -> Figures:
    """The figures of GQA's official evaluator (Hudson and Manning 2019, section 4.4) over the balanced questions.

    - ``accuracy``: the part whose prediction is the answer, letter by letter; ``open`` over the questions of the
      structural type ``query``, ``binary`` over all others.
    - ``consistency``: over each question that is right and entails others, the mean part of these that is right too. It
      needs answer and prediction of every entailed question, which the balanced files do not have.
    - ``validity`` and ``plausibility``: the part whose prediction is among the question's choices.
    - ``distribution``: chi-squared distance of the predicted answers from the right ones in each group of questions,
      averaged over the groups by their size and divided by 100. Lower is better.

    ``grounding`` needs attention maps, which a result file has not.

    Args:
        predictions: by the id of the question.
        questions: of one split, balanced and others.
        choices: of the questions, from the file of choices.

    Raises:
        DataError: no balanced question has an answer, or one has no prediction.
    """
    scored = [question for question in questions if question.balanced and question.answer is not None]
    if not scored:
        raise DataError("no balanced question has an answer; there is nothing to score")
    if lacking := [question.id for question in scored if question.id not in predictions]:
        raise DataError(f"{counted(len(lacking), 'balanced question')} without a prediction, such as {lacking[0]!r}")
    right = {question.id: predictions[question.id] == question.answer for question in scored}
    found: dict[str, float | str] = {"accuracy": _mean(right.values())}
    # What a file does not tell has no figure, and a sentence in its place.
    if untyped := [question.id for question in scored if not question.kind]:
        found["binary"] = found["open"] = (
            f"{counted(len(untyped), 'question')} without a structural type, such as {untyped[0]!r}"
        )
    else:
        for name, is_open in (("binary", False), ("open", True)):
            some = [right[question.id] for question in scored if (question.kind == "query") == is_open]
            found[name] = _mean(some) if some else f"no question is {name}"
    found["consistency"] = _consistency(predictions, questions, scored, right)
    for name in ("validity", "plausibility"):
        found[name] = _chosen(predictions, scored, choices, name)
    found["grounding"] = "it needs attention maps, which a result file has not"
    found["distribution"] = _distribution(predictions, scored)
    details = {
        "structural type": by_group((question.kind, right[question.id]) for question in scored),
        "semantic type": by_group((question.semantic, right[question.id]) for question in scored),
        "steps": by_group((question.steps, right[question.id]) for question in scored),
        "words": by_group((len(question.text.split()), right[question.id]) for question in scored),
    }
    return Figures(
        {name: value for name, value in found.items() if not isinstance(value, str)},
        {name: value for name, value in found.items() if isinstance(value, str)},
        {name: groups for name, groups in details.items() if groups},
    )


def _mean(values: Iterable[bool] | Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _consistency(
    predictions: Mapping[str, str],
    questions: Sequence[GqaQuestion],
    scored: Sequence[GqaQuestion],
    right: Mapping[str, bool],
) -> float | str:
    answers = {question.id: question.answer for question in questions}
    # GQA lists a question among those that it entails.
    entailed = {question.id: [key for key in question.entailed if key != question.id] for question in scored}
    needed = dict.fromkeys(key for keys in entailed.values() for key in keys)
    for what, known in (("answer", {key for key, answer in answers.items() if answer is not None}),
                        ("prediction", predictions)):  # fmt: skip
        if lacking := [key for key in needed if key not in known]:
            some = f"{len(lacking):,} of {counted(len(needed), 'entailed question')}"
            return f"{some} without {what}, such as {lacking[0]!r}"
    parts = [
        _mean(predictions[key] == answers[key] for key in keys)
        for question, keys in entailed.items()
        if right[question] and keys
    ]
    return _mean(parts) if parts else "no question that is right entails another"


def _chosen(
    predictions: Mapping[str, str], scored: Sequence[GqaQuestion], choices: Mapping[str, Choices] | None, name: str
) -> float | str:
    """The part of predictions that is among the choices, as the evaluator has it.

    For what two objects have in common its choices are colour, material and shape, whatever the file says.
    """
    if choices is None:
        return "it needs the file of choices of the split, which is not given"
    if lacking := [question.id for question in scored if question.id not in choices]:
        return f"{counted(len(lacking), 'question')} without choices, such as {lacking[0]!r}"
    kind = "valid" if name == "validity" else "plausible"
    return _mean(
        predictions[question.id]
        in (_COMMON if "Common" in question.detailed else getattr(choices[question.id], kind))
        for question in scored
    )  # fmt: skip


def _distribution(predictions: Mapping[str, str], scored: Sequence[GqaQuestion]) -> float | str:
    gold: dict[str, Counter[str | None]] = {}
    predicted: dict[str, Counter[str | None]] = {}
    for question in scored:
        if question.group is not None:
            gold.setdefault(question.group, Counter())[question.answer] += 1
            predicted.setdefault(question.group, Counter())[predictions[question.id]] += 1
    if not gold:
        return "the questions do not say their groups"
    distances = [
        # Over the right answers alone, as the evaluator sums.
        sum((predicted[group][answer] - count) ** 2 / count for answer, count in answers.items())
        for group, answers in gold.items()
    ]
    return float(np.average(distances, weights=[answers.total() for answers in gold.values()])) / 100


def write_gqa(predictions: Mapping[str, str], out: Path, questions: Sequence[GqaQuestion]) -> Path:
    """Write ``[{"questionId": str, "prediction": str}, ...]``, checked by `check_gqa` before it is moved to ``out``.

    Raises:
        DataError: a balanced question has no prediction, or a prediction no question; nothing is written.
    """
    rows = ({"questionId": key, "prediction": answer} for key, answer in predictions.items())
    return write_checked(out, lambda file: write_rows(rows, file), lambda path: check_gqa(path, questions))


def check_gqa(path: Path, questions: Iterable[GqaQuestion], *, only: bool = True) -> list[str]:
    """List what GQA's server would refuse in a result file, one line for each problem.

    It must be a JSON list of ``questionId`` (text, even though it is a number) and ``prediction`` (text), with every
    balanced question, and with ``only`` no question of another set. The official evaluator passes over these.

    Raises:
        DataError: the file is not a JSON list.
    """
    questions = list(questions)
    rows, problems = read_rows(path, "questionId", "prediction", str)
    balanced = [question.id for question in questions if question.balanced]
    known = [question.id for question in questions]
    return problems + coverage_problems([key for key, _ in rows], known, balanced, only=only)


def read_gqa(path: Path) -> dict[str, str]:
    """The predictions of a result file. Raises ``DataError`` for one that is malformed."""
    return predictions_of(*read_rows(path, "questionId", "prediction", str), path)


def check(path: Path, documents: list[Document], task: str) -> Checked:
    """Check and score a result file of GQA; the documents may hold its choices."""
    choices: dict[str, Choices] = {}
    questions = []
    for document in documents:
        if is_choices(document):
            choices |= gqa_choices(document)
        else:
            questions += gqa_questions(document)
    if not questions:
        raise DataError(f"--data: {documents[0].path} holds choices; name the file of their questions as well")

    def score(predictions: Mapping[str, str]) -> Figures:
        return gqa_scores(predictions, questions, choices or None)

    labelled = any(question.balanced and question.answer is not None for question in questions)
    ids = [question.id for question in questions]
    problems = check_gqa(path, questions, only=False)
    return checked(task, ids, problems, lambda: read_gqa(path), score if labelled else None)


def write(
    predictions: Mapping[Any, Any], examples: Sequence[Example], files: Sequence[Path], out: Path, task: str
) -> Path:
    """Write the answers of the questions ``examples``; ``files``, where they come from, say which must be answered."""
    return write_gqa({str(key): text for key, text in predictions.items()}, out, _questions(examples, files))


def _questions(examples: Sequence[Example], files: Sequence[Path]) -> list[GqaQuestion]:
    if files:
        return [question for file in files for question in read_gqa_questions(file)]
    return [
        GqaQuestion(str(row.id), row.pictures[0], row.text, _best(row.answers), True, (), row.kind) for row in examples
    ]


def _best(answers: Mapping[str, float] | None) -> str | None:
    return max(answers, key=answers.__getitem__) if answers else None
