"""The files of the study of pairs: four sources to train on, and two held-out sets, whose texts are not trained on."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.overlap import same_text
from capt.pretrain.data.sts_files import Pairs, find_sets
from capt.pretrain.pairs.sources import text_key

SOURCES = ("nli", "qqp", "qnli", "flickr")
HELD_OUT = 3
"""Questions of QNLI of which one is held out, by the key of its text."""

Row = dict[str, Any]


def write_files(data: Path, out: Path) -> dict[str, int]:
    """Write ``out/NAME.jsonl`` of each source, ``stsb.jsonl`` and ``qnli_held_out.jsonl``; rows by name.

    A training row with a text of the test set of STS-B, or of a held-out row of QNLI, is left out (`without`).
    """
    out.mkdir(parents=True, exist_ok=True)
    test = next(pairs for pairs in find_sets(data / "glue" / "STS-B") if pairs.split == "test")
    scored = [
        {"sentence1": a, "sentence2": b, "score": float(score)}
        for a, b, score in zip(test.first, test.second, test.gold, strict=True)
    ]
    qnli = list(_qnli(data))
    held_out = [row for row in qnli if text_key(row["query"]) % HELD_OUT == 0]
    kept_back = {words_of(text) for row in (*scored, *held_out) for text in _texts(row)}
    rows: Mapping[str, Iterable[Row]] = {
        "nli": _nli(data),
        "qqp": _qqp(data),
        "qnli": (row for row in qnli if text_key(row["query"]) % HELD_OUT),
        "flickr": _flickr(data),
    }
    counts = {}
    for name, each in rows.items():
        counts[name] = _write(out / f"{name}.jsonl", without(kept_back, each))
    everything = {text: None for name in SOURCES for text in _lines(out / f"{name}.jsonl")}
    counts["texts"] = _write(out / "texts.jsonl", [{"text": text} for text in everything])
    return counts | {
        "stsb": _write(out / "stsb.jsonl", scored),
        "qnli_held_out": _write(out / "qnli_held_out.jsonl", held_out),
    }


def write_kept_back(data: Path, path: Path) -> None:
    """Write the test pairs of MRPC, with 1 for a paraphrase and 0 for none."""
    if not path.exists():
        table = _table(data / "glue" / "MRPC" / "msr_paraphrase_test.txt", encoding="utf-8-sig")
        rows = [(row["#1 String"], row["#2 String"], float(row["Quality"])) for row in table]
        _write(path, [{"sentence1": first, "sentence2": second, "score": label} for first, second, label in rows])


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, equal for texts that differ in case, spaces or punctuation: Flickr8k writes ``swings .``"""
    return tuple(re.findall(r"\w+", same_text(text)))


def without(kept_back: Set[tuple[str, ...]], rows: Iterable[Row]) -> list[Row]:
    """The rows that have no text, hard negatives included, with the words of one in ``kept_back``."""
    return [row for row in rows if kept_back.isdisjoint(map(words_of, _texts(row)))]


def counting_words(files: Path) -> dict[str, float | None]:
    """Figures of counting words, without any model: Spearman by TF-IDF on STS-B and MRPC, MRR by BM25 on held-out QNLI.

    The distinct sentences of the held-out rows are ranked; those of an equal score count as before the right one.
    """
    import bm25s

    from capt.pretrain.language.sts import word_figures

    figures = {}
    for name in ("stsb", "mrpc"):
        rows = _rows(files / f"{name}.jsonl")
        first, second, gold = ([row[key] for row in rows] for key in ("sentence1", "sentence2", "score"))
        figures[name] = word_figures(Pairs(name, "test", first, second, np.array(gold)))["spearman/tf-idf"]
    rows = _rows(files / "qnli_held_out.jsonl")
    sentences = list(dict.fromkeys(row["pos"][0] for row in rows))
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(sentences, stopwords=None, show_progress=False), show_progress=False)
    ranks = []
    for row in rows:
        (words,) = bm25s.tokenize([row["query"]], stopwords=None, return_ids=False, show_progress=False)
        known = [word for word in words if word in index.vocab_dict]
        scores = index.get_scores(known) if known else np.zeros(len(sentences))
        ranks.append(int((scores >= scores[sentences.index(row["pos"][0])]).sum()))
    return figures | {"qnli": sum(1 / rank for rank in ranks) / len(ranks)}


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _texts(row: Row) -> Iterator[str]:
    for value in row.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from value


def _write(path: Path, rows: Sequence[Row]) -> int:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def _lines(path: Path) -> Iterator[str]:
    """The queries and positives of a file, hard negatives not."""
    for row in _rows(path):
        yield from (row["query"], *row["pos"])


def _table(path: Path, encoding: str = "utf-8") -> Iterator[dict[str, str]]:
    with path.open(encoding=encoding, newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _nli(data: Path) -> Iterator[Row]:
    """Premises with an entailed hypothesis, and their contradictions as hard negatives."""
    by_premise: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in _table(data / "glue" / "MNLI" / "train.tsv"):
        by_premise[row["sentence1"]][row["gold_label"]].append(row["sentence2"])
    for premise, of in by_premise.items():
        if of["entailment"]:
            yield {"query": premise, "pos": of["entailment"], "neg": of["contradiction"]}


def _qqp(data: Path) -> Iterator[Row]:
    for row in _table(data / "glue" / "QQP" / "train.tsv"):
        if row["is_duplicate"] == "1" and row["question1"].strip() and row["question2"].strip():
            yield {"query": row["question1"], "pos": [row["question2"]]}


def _qnli(data: Path) -> Iterator[Row]:
    for row in _table(data / "glue" / "QNLI" / "dev.tsv"):
        if row["label"] == "entailment":
            yield {"query": row["question"], "pos": [row["sentence"]]}


def _flickr(data: Path) -> Iterator[Row]:
    """The first caption of each picture, and its others."""
    captions: dict[str, list[str]] = defaultdict(list)
    with gzip.open(data / "vl" / "captions" / "Flickr8k.token.txt.gz", "rt", encoding="utf-8") as file:
        for line in file:
            name, text = line.strip().split(maxsplit=1)  # by a tab, and in one line by spaces
            captions[name.partition("#")[0]].append(text)
    for first, *others in captions.values():
        yield {"query": first, "pos": others}
