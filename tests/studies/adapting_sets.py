"""Data of the study of adapting: sets of texts, clean and with damaged words, and the text that is trained on."""

from __future__ import annotations

import csv
import gzip
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.overlap import same_text
from capt.pretrain.data.sts_files import find_sets
from tests.studies.resampling import spearman

TEXTS = ("general", "cranfield")
"""Training texts; see `training_text`."""
NOISES = ("clean", "dropped", "substituted", "misspelt")
SHARE = 0.2
"""Share of the words that are damaged."""
_PICTURES = 1000

Rows = Float[np.ndarray, "n d"]


@dataclass(frozen=True)
class MeasuredSet:
    """Queries and documents; queries are damaged, documents never are.

    Attributes:
        name: of the set.
        tuned: whether settings are chosen on it; the others are reported.
        queries: first sentences, questions or captions.
        documents: second sentences, or what is searched.
        gold: human scores of similarity, one a pair; or the judged documents of each query with their judgements.
    """

    name: str
    tuned: bool
    queries: list[str]
    documents: list[str]
    gold: np.ndarray | list[dict[int, int]]

    @property
    def metric(self) -> str:
        """Name of its measure."""
        if isinstance(self.gold, np.ndarray):
            return "Spearman"
        return "nDCG@10" if any(len(judged) > 1 for judged in self.gold) else "first hit"

    def score(self, queries: Rows, documents: Rows) -> tuple[float, np.ndarray]:
        """The metric x 100, and what it is made of: the cosine of each pair, or the figure of each query.

        Args:
            queries: unit rows.
            documents: unit rows.
        """
        if isinstance(self.gold, np.ndarray):
            cosines = (queries * documents).sum(1)
            return 100 * float(spearman(cosines, self.gold)), cosines
        return self.score_ranks(queries @ documents.T)

    def score_ranks(self, scores: Float[np.ndarray, "q n"]) -> tuple[float, np.ndarray]:
        """The metric x 100 of scores of all documents, and the figure of each query; ties go to the first document."""
        assert isinstance(self.gold, list)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :10]
        figures = np.array([_ndcg(row, judged) for row, judged in zip(best.tolist(), self.gold, strict=True)])
        if self.metric == "first hit":
            figures = np.array([float(row[0] in judged) for row, judged in zip(best, self.gold, strict=True)])
        return 100 * float(figures.mean()), figures


def _ndcg(ranked: Sequence[int], judged: Mapping[int, int]) -> float:
    discounts = 1 / np.log2(np.arange(2, 12))
    gains = np.array([judged.get(document, 0) for document in ranked], dtype=float)
    ideal = np.sort(list(judged.values()))[::-1][:10].astype(float)
    return float((gains * discounts[: len(gains)]).sum() / (ideal * discounts[: len(ideal)]).sum())


def measured_sets(data: Path) -> list[MeasuredSet]:
    """STS-B dev and one half of QNLI, to tune on; STS-B test, the other half, captions and Cranfield, to report."""
    sets = [
        MeasuredSet(f"STS-B {pairs.split}", pairs.split == "dev", list(pairs.first), list(pairs.second), pairs.gold)
        for pairs in find_sets(data / "glue" / "STS-B")
    ]
    rows = list(_qnli(data / "glue" / "QNLI" / "dev.tsv"))
    middle = len(rows) // 2
    sets += [_answers("QNLI A", True, rows[:middle]), _answers("QNLI B", False, rows[middle:])]
    return [*sets, _captions(data), _cranfield(data)]


def _qnli(path: Path) -> Iterator[tuple[str, str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield row["question"], row["sentence"], row["label"]


def _answers(name: str, tuned: bool, rows: Sequence[tuple[str, str, str]]) -> MeasuredSet:
    """Questions whose sentence answers them, among all sentences of the rows."""
    documents = list(dict.fromkeys(sentence for _, sentence, _ in rows))
    place = {sentence: number for number, sentence in enumerate(documents)}
    answered = [(question, sentence) for question, sentence, label in rows if label == "entailment"]
    return MeasuredSet(
        name, tuned, [question for question, _ in answered], documents, [{place[s]: 1} for _, s in answered]
    )


def _pictures(data: Path) -> dict[str, list[str]]:
    captions: dict[str, list[str]] = {}
    with gzip.open(data / "vl" / "captions" / "Flickr8k.token.txt.gz", "rt", encoding="utf-8") as file:
        for line in file:
            name, _, caption = line.rstrip("\n").partition("\t")
            captions.setdefault(name.partition("#")[0], []).append(caption)
    order = sorted(captions)
    random.Random("pictures").shuffle(order)
    return {name: captions[name] for name in order}


def _captions(data: Path) -> MeasuredSet:
    """The first caption of a picture finds the second one among those of all measured pictures."""
    chosen = list(_pictures(data).values())[:_PICTURES]
    queries, documents = [each[0] for each in chosen], [each[1] for each in chosen]
    return MeasuredSet("captions", False, queries, documents, [{number: 1} for number in range(len(chosen))])


def _cranfield_rows(data: Path, name: str) -> list[dict[str, str]]:
    path = data / "retrieval" / "cranfield" / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _cranfield(data: Path) -> MeasuredSet:
    documents, queries = _cranfield_rows(data, "corpus.jsonl"), _cranfield_rows(data, "queries.jsonl")
    place = {row["_id"]: number for number, row in enumerate(documents)}
    judged: dict[str, dict[int, int]] = {row["_id"]: {} for row in queries}
    qrels = data / "retrieval" / "cranfield" / "qrels" / "test.tsv"
    for line in qrels.read_text(encoding="utf-8").splitlines()[1:]:
        query, document, grade = line.split("\t")
        if int(grade) > 0 and document in place:
            judged[query][place[document]] = int(grade)
    kept = [row for row in queries if judged[row["_id"]]]
    texts = [f"{row.get('title', '')} {row['text']}".strip() for row in documents]
    return MeasuredSet("Cranfield", False, [row["text"] for row in kept], texts, [judged[row["_id"]] for row in kept])


def training_text(data: Path, sets: Sequence[MeasuredSet], text: str = "general") -> tuple[list[str], int]:
    """Lines to train on, in a fixed random order, and how many were left out because a measured set has them.

    ``general`` are the questions and sentences of QNLI's test set, the sentences of STS-B's training set, and a caption
    of each picture that is not measured: text of the kind that is measured, but for Cranfield, without any label.
    ``cranfield`` are the sentences of Cranfield's documents. These are what is searched, so they alone are kept; no
    query and no judgement is trained on.
    """
    if text == "cranfield":
        lines = [line for document in _cranfield_rows(data, "corpus.jsonl") for line in _sentences(document["text"])]
        measured = {same_text(query) for each in sets for query in each.queries}
    else:
        lines = _general_lines(data)
        measured = {same_text(text) for each in sets for text in (*each.queries, *each.documents)}
    by_form = {same_text(line): line for line in lines if line.strip()}
    kept = [line for form, line in by_form.items() if form not in measured]
    random.Random("order").shuffle(kept)
    return kept, len(by_form) - len(kept)


def _general_lines(data: Path) -> list[str]:
    glue = data / "glue"
    with (glue / "QNLI" / "test.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    (pairs,) = (each for each in find_sets(glue / "STS-B", ["train"]) if each.split == "train")
    captions = [each[2] for each in list(_pictures(data).values())[_PICTURES:]]
    return [*(row[key] for row in rows for key in ("question", "sentence")), *pairs.first, *pairs.second, *captions]


def _sentences(text: str) -> list[str]:
    """The sentences of an abstract of Cranfield, whose full stops are set apart."""
    return [f"{part.strip()} ." for part in text.split(" .") if part.strip()]


def damaged(texts: Sequence[str], noise: str, words: Sequence[str]) -> list[str]:
    """``texts`` with a share of the words dropped, substituted by one of ``words``, or misspelt by one letter."""
    if noise == "clean":
        return list(texts)
    damage: Callable[[str, random.Random], str] = {
        "dropped": lambda word, draw: "",
        "substituted": lambda word, draw: draw.choice(words),
        "misspelt": _misspell,
    }[noise]
    out = []
    for number, text in enumerate(texts):
        draw = random.Random(f"{noise} {number} {text}")
        new = [damage(word, draw) if draw.random() < SHARE else word for word in text.split()]
        out.append(" ".join(filter(None, new)) or text)
    return out


def _misspell(word: str, draw: random.Random) -> str:
    """Leave out a letter, add one, change it, or swap it with the next."""
    place = draw.randrange(len(word))
    letter = draw.choice(string.ascii_lowercase)
    after = word[place + 1 :]
    return draw.choice(
        [
            word[:place] + after,
            word[:place] + letter + word[place:],
            word[:place] + letter + after,
            word[:place] + after[:1] + word[place] + after[1:],
        ]
    )
