"""Mined negatives against the literal rules, the audit, and the same output on any number of ranks."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.overlap import same_text
from capt.pretrain.retrieval import mine as room
from capt.pretrain.retrieval.audit import faults, page
from capt.pretrain.retrieval.mine import mine
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, Rules
from capt.pretrain.retrieval.search import unit_rows
from tests.support import Capt, run_ranks
from tests.unit.retrieval.toy import ToyEncoder, ToyScorer, write_beir, write_sentence_folder

_WORDS = ["river", "stone", "house", "door", "bird", "tree", "road", "bread", "king", "queen", "water", "fire", "wind"]


def write_pairs(folder: Path, rows: int = 25, documents: int = 150, seed: int = 0) -> tuple[Path, Path]:
    """Pairs with several positives and further fields, queries that are documents, and copies of positives."""
    generator = random.Random(seed)

    def text() -> str:
        return " ".join(generator.choices(_WORDS, k=generator.randint(2, 5)))

    corpus = list(dict.fromkeys(text() for _ in range(documents)))
    pairs = []
    for i in range(rows):
        positives = generator.sample(corpus, generator.randint(1, 3))
        query = generator.choice([text(), generator.choice(corpus)])
        if same_text(query) in map(same_text, positives):
            continue
        pairs.append({"query": query, "pos": positives, "source": i, "extra": {"kept": [i]}})
    pairs.append({**pairs[0], "pos": [corpus[0]], "source": "the same query again"})
    copies = [each.upper() + " " for each in corpus[:40]]
    rows_of_corpus = [{"_id": str(i), "text": each} for i, each in enumerate([*corpus, *copies])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_corpus))
    return folder / "pairs.jsonl", folder / "corpus.jsonl"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "load_text_encoder", lambda *_: ToyEncoder())


def mined(folder: Path, name: str = "out", **rules: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    pairs, corpus = write_pairs(folder)
    audit = mine(
        [pairs],
        corpus,
        Path("toy"),
        folder / name,
        EncodeOptions(str(folder / "store")),
        EncoderOptions(),
        Rules(**rules),
    )
    lines = [json.loads(line) for line in (folder / name / "pairs.jsonl").read_text().splitlines()]
    assert json.loads((folder / name / "audit.json").read_text()) == audit
    return lines, audit


def reference(folder: Path, rules: Rules) -> list[list[str]]:
    """The rules, one query and one document at a time."""
    pairs, corpus = write_pairs(folder)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts: dict[str, str] = {}
    for line in corpus.read_text().splitlines():
        text = json.loads(line)["text"]
        texts[same_text(text)] = text
    encoder = ToyEncoder()
    positives: dict[str, set[str]] = {}
    for row in rows:
        positives.setdefault(same_text(row["query"]), set()).update(map(same_text, row["pos"]))

    @functools.cache
    def unit_row(text: str) -> np.ndarray:
        return unit_rows(encoder.encode([text], "document")).astype(np.float64)

    def cosine(query: str, text: str) -> np.float32:
        return np.float32((unit_row(query) * unit_row(text)).sum())

    expected = []
    for row in rows:
        own = positives[same_text(row["query"])]
        originals = {same_text(text): text for each in rows if same_text(each["query"]) == same_text(row["query"])
                     for text in each["pos"]}  # fmt: skip
        s_pos = float(min(cosine(row["query"], text) for text in originals.values()))
        ranked = [(cosine(row["query"], text), text) for name, text in texts.items()
                  if name not in own and name != same_text(row["query"])]  # fmt: skip
        ranked.sort(key=lambda each: each[1], reverse=True)
        ranked.sort(key=lambda each: -each[0])
        kept = []
        for score, text in ranked[rules.first : rules.last]:
            if rules.max_score is not None and score > rules.max_score:
                continue
            if rules.margin is not None and score > s_pos - rules.margin:
                continue
            if rules.relative_margin is not None and score > s_pos - abs(s_pos) * rules.relative_margin:
                continue
            kept.append(text)
        expected.append(kept[: rules.number])
    return expected


@pytest.mark.parametrize(
    "rules",
    [
        Rules(number=5),
        Rules(number=4, first=3, last=30, short="keep"),
        Rules(number=6, last=60, max_score=0.5, short="keep"),
        Rules(number=6, last=60, margin=0.1, short="keep"),
        Rules(number=6, last=60, relative_margin=0.3, short="keep"),
    ],
    ids=["top", "range", "max score", "margin", "relative margin"],
)
def test_the_rules_one_by_one(rules: Rules, tmp_path: Path) -> None:
    lines, audit = mined(tmp_path, **vars(rules))
    expected = reference(tmp_path, rules)
    assert [line["neg"] for line in lines] == expected
    short = sum(len(each) < rules.number for each in expected)
    assert audit["rows_with_too_few_negatives"] == short
    assert any(expected)


def test_a_relative_margin_of_a_negative_score_moves_down() -> None:
    """``s_pos * (1 - m)`` would let a negative be nearer than its positive."""
    rules = Rules(relative_margin=0.5)
    assert room._refused(-0.25, -0.2, rules)
    assert not room._refused(-0.31, -0.2, rules)


def test_all_fields_of_a_row_are_kept(tmp_path: Path) -> None:
    lines, audit = mined(tmp_path, number=2)
    pairs, _ = write_pairs(tmp_path)
    given = [json.loads(line) for line in pairs.read_text().splitlines()]
    for row, line in zip(given, lines, strict=True):
        assert {name: line[name] for name in row} == row
        assert len(line["neg"]) == 2
    assert audit["rows_read"] == audit["rows_written"] == len(given)


def test_negatives_that_a_row_has_stay_and_are_not_mined_again(tmp_path: Path) -> None:
    lines, _ = mined(tmp_path, number=2)
    pairs, corpus = write_pairs(tmp_path)
    pairs.write_text("".join(json.dumps({**line, "neg": line["neg"][:1]}) + "\n" for line in lines))
    mine(
        [pairs],
        corpus,
        Path("toy"),
        tmp_path / "2",
        EncodeOptions(str(tmp_path / "store")),
        EncoderOptions(),
        Rules(number=1),
    )
    again = [json.loads(line) for line in (tmp_path / "2" / "pairs.jsonl").read_text().splitlines()]
    assert [line["neg"] for line in again] == [line["neg"] for line in lines]


@pytest.mark.parametrize("names", [
    ("query", "pos", "neg"), ("anchor", "positive", "negative"), ("question", "answer", "hard_negative"),
    ("sentence1", "sentence2", "negatives"),
])  # fmt: skip
@pytest.mark.parametrize("scores", [(), ("pos_scores", "neg_scores")])
def test_training_reads_what_was_mined(names: tuple[str, ...], scores: tuple[str, ...], tmp_path: Path) -> None:
    """Columns of the input must not hide the new negatives, nor scores be fewer than negatives."""
    from capt.pretrain.pairs.forms import read_pairs

    _, corpus = write_pairs(tmp_path)
    given = [(f"river {i}", f"stone {i}", f"house {i}") for i in range(3)]
    rows = [{**dict(zip(names, texts, strict=True)), **{name: [0.5] for name in scores}} for texts in given]
    pairs = tmp_path / "named.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    audit = mine([pairs], corpus, Path("toy"), tmp_path / "out", EncodeOptions(str(tmp_path / "store")),
                 EncoderOptions(), Rules(number=2))  # fmt: skip
    read = [pair for _, pair in read_pairs([tmp_path / "out" / "pairs.jsonl"])]
    assert [(pair.query, pair.positives, pair.negatives[0]) for pair in read] == [(q, (p,), n) for q, p, n in given]
    assert [len(pair.negatives) for pair in read] == [3, 3, 3]
    assert ("row scores: the new negatives have none" in audit["removed"]) == bool(scores)


@pytest.mark.parametrize("column", ["is_duplicate", "score"])
def test_the_command_that_is_named_trains_on_what_was_mined_from_scored_rows(column: str, tmp_path: Path) -> None:
    """A score of the input stays in its row, beside the new negatives, and is none of three texts."""
    from capt.pretrain.pairs.forms import read_pairs

    _, corpus = write_pairs(tmp_path)
    pairs = tmp_path / "scored.csv"
    pairs.write_text(f"question1,question2,{column}\nriver 1,stone 1,1\nriver 2,stone 2,0\n")
    mine(
        [pairs],
        corpus,
        Path("toy"),
        tmp_path / "out",
        EncodeOptions(str(tmp_path / "store")),
        EncoderOptions(),
        Rules(number=2),
    )
    read = [pair for _, pair in read_pairs([tmp_path / "out" / "pairs.jsonl"], form="flagembedding")]
    assert [(pair.query, pair.positives, pair.score, len(pair.negatives)) for pair in read] == [
        ("river 1", ("stone 1",), None, 2), ("river 2", ("stone 2",), None, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("copy", [
    {"text": "Caf\u00e9 door"}, {"text": "cafe\u0301  DOOR"}, {"title": "A Title", "text": "cafe\u0301 door"},
])  # fmt: skip
def test_a_copy_of_a_positive_is_no_negative(copy: dict[str, str], tmp_path: Path) -> None:
    pairs, corpus = tmp_path / "pairs.jsonl", tmp_path / "corpus.jsonl"
    pairs.write_text(json.dumps({"query": "a door", "pos": ["cafe\u0301 door"]}) + "\n")
    rows = [{"_id": "other id", **copy}, {"_id": "1", "text": "a stone"}, {"_id": "2", "text": "a house"}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine([pairs], corpus, Path("toy"), tmp_path / "out", EncodeOptions(str(tmp_path / "store")), EncoderOptions(),
         Rules(number=2, last=2))  # fmt: skip
    (line,) = (json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines())
    assert sorted(line["neg"]) == ["a house", "a stone"]


def test_passages_of_a_folder_are_those_of_a_search_and_none_holds_a_positive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long document is cut in three, one of which holds the answer."""
    monkeypatch.setattr(room, "load_text_encoder", lambda *_: ToyEncoder(length=12))
    folder = tmp_path / "documents"
    (folder / "below").mkdir(parents=True)
    parts = ["Stone house road and a bird.", "A king opens the Door, at night.", "Bread water fire wind tree."]
    (folder / "long.md").write_text("\n\n".join(parts))
    (folder / "below" / "other.html").write_text("<p>A queen <b>sings</b>.</p>")
    (folder / "short.txt").write_text("the door")  # a part of the answer
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "what does the king do", "pos": ["opens  the door"]}) + "\n")
    # A folder for the output within the documents is no source.
    audit = mine([pairs], folder, Path("toy"), folder / "out", EncodeOptions(str(tmp_path / "store")), EncoderOptions(),
                 Rules(number=2, last=2))  # fmt: skip
    (line,) = (json.loads(line) for line in (folder / "out" / "pairs.jsonl").read_text().splitlines())
    assert audit["documents"] == 5
    assert len(line["neg"]) == 2
    # Passages overlap by a word.
    assert set(line["neg"]) <= {parts[0], f"night.\n\n{parts[2]}", "A queen sings."}


@pytest.mark.parametrize(("row", "says"), [
    ({"query": "a", "pos": ["b"], "neg": ["c", "c "]}, "has a negative twice"),
    ({"query": "a", "pos": ["b"], "neg": ["B"]}, "is a positive of the same query"),
    ({"query": " ", "pos": ["b"]}, "empty query or positive"),
    ({"query": "a", "pos": ["b", ""]}, "empty query or positive"),
])  # fmt: skip
def test_a_bad_row_of_the_input_is_named(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    _, corpus = write_pairs(tmp_path)
    pairs = tmp_path / "bad.jsonl"
    pairs.write_text(json.dumps({"query": "x", "pos": ["y"]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"bad.jsonl, line 2: .*{says}"):
        mine([pairs], corpus, Path("toy"), tmp_path / "out", EncodeOptions(str(tmp_path / "store")), EncoderOptions(),
             Rules(number=1))  # fmt: skip


def test_drawn_negatives_belong_to_the_query(tmp_path: Path) -> None:
    first, _ = mined(tmp_path, number=3, choice="random", last=50)
    same, _ = mined(tmp_path, "same", number=3, choice="random", last=50)
    other, _ = mined(tmp_path, "other", number=3, choice="random", last=50, seed=2)
    top, _ = mined(tmp_path, "top", number=50, last=50)
    assert first == same != other
    assert all(set(line["neg"]) <= set(all_of["neg"]) for line, all_of in zip(first, top, strict=True))
    assert first[0]["neg"] == first[-1]["neg"]


def test_the_consistency_filter_keeps_pairs_whose_positive_is_near(tmp_path: Path) -> None:
    lines, audit = mined(tmp_path, number=0, keep_top=2, last=50)
    pairs, corpus = write_pairs(tmp_path)
    kept = []
    encoder = ToyEncoder()
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts = {same_text(text): text for text in (json.loads(line)["text"] for line in corpus.read_text().splitlines())}
    for row in rows:
        own = {same_text(t) for other in rows if same_text(other["query"]) == same_text(row["query"])
               for t in other["pos"]}  # fmt: skip
        query = unit_rows(encoder.encode([row["query"]], "query")).astype(np.float64)[0]
        scores = {name: np.float32(unit_rows(encoder.encode([text], "document")).astype(np.float64)[0] @ query)
                  for name, text in texts.items() if name != same_text(row["query"])}  # fmt: skip
        positives = [text for other in rows if same_text(other["query"]) == same_text(row["query"])
                     for text in other["pos"]]  # fmt: skip
        best = max(
            np.float32(unit_rows(encoder.encode([t], "document")).astype(np.float64)[0] @ query) for t in positives
        )
        if sum(score > best for name, score in scores.items() if name not in own) < 2:
            kept.append(row["source"])
    assert [line["source"] for line in lines] == kept
    assert 0 < len(kept) < len(rows)
    assert audit["removed"]["row: its positive is not near"]["count"] == len(rows) - len(kept)


def test_bad_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows have fewer than 20 negatives, the first is .*, line \d+: .*--short"):
        mined(tmp_path, number=20, margin=0.3, short="refuse")
    assert not (tmp_path / "out").exists()
    kept, audit = mined(tmp_path, "kept", number=20, margin=0.3)
    short = sum(len(line["neg"]) < 20 for line in kept)
    assert len(kept) == audit["rows_read"], "rows with fewer negatives are kept unless the user says otherwise"
    assert 0 < short == audit["rows_with_too_few_negatives"]
    lines, audit = mined(tmp_path, number=20, margin=0.3, short="drop")
    assert all(len(line["neg"]) == 20 for line in lines)
    assert audit["removed"]["row: too few negatives"]["count"] + len(lines) == audit["rows_read"]
    with pytest.raises(DataError, match="already exists"):
        mined(tmp_path, number=1)


@pytest.mark.parametrize(
    ("negatives", "says"),
    [
        (["Stone  house"], "is a positive of the same query"),
        (["the QUERY"], "is the query itself"),
        (["road", "road "], "has a negative twice"),
    ],
)
def test_the_audit_finds_what_would_do_harm(negatives: list[str], says: str) -> None:
    rows = [
        {"query": "the query", "pos": ["river"], "neg": negatives},
        {"query": "The  query", "pos": ["stone house"], "neg": ["door"]},
    ]
    ((number, fault),) = faults(rows)
    assert number == 0
    assert says in fault
    assert faults([{**rows[0], "neg": ["bird"]}, rows[1]]) == []


def test_a_cross_encoder_decides_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cross = ToyScorer(lambda _, text: len(text) / 64)
    monkeypatch.setattr(room, "load_reranker", lambda _: cross)
    pairs, corpus = write_pairs(tmp_path)
    old = {"query": "a river in a town", "pos": ["the river"], "neg": ["a longer text than all others", "b"],
           "pos_scores": [7], "negative_scores": [3, 2]}  # fmt: skip
    pairs.write_text(pairs.read_text() + json.dumps(old) + "\n")
    audit = mine([pairs], corpus, Path("toy"), tmp_path / "out", EncodeOptions(str(tmp_path / "store")),
                 EncoderOptions(), Rules(number=3, last=40, margin=0.01, short="keep"),
                 cross_encoder=Path("cross"))  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert audit["cross_encoder"] == "cross"
    assert sum(len(line["neg"]) for line in lines) > 10
    taught = lines.pop()
    assert taught["neg"][:2] == old["neg"]
    assert taught["neg_scores"] == [len(text) / 64 for text in taught["neg"]], "its own negatives too"
    assert "negative_scores" not in taught
    for line in lines:
        assert line["pos_scores"] == [len(text) / 64 for text in line["pos"]]
        assert line["neg_scores"] == sorted((len(text) / 64 for text in line["neg"]), reverse=True)
        assert all(score <= min(line["pos_scores"]) - 0.01 for score in line["neg_scores"])
    before = cross.scored
    mine([pairs], corpus, Path("toy"), tmp_path / "again", EncodeOptions(str(tmp_path / "store")), EncoderOptions(),
         Rules(number=3, last=40, margin=0.01, short="keep"), cross_encoder=Path("cross"))  # fmt: skip
    assert cross.scored == before, "scores are kept, as vectors are"
    assert (tmp_path / "again" / "pairs.jsonl").read_bytes() == (tmp_path / "out" / "pairs.jsonl").read_bytes()


def test_the_page_shows_texts_as_they_are(tmp_path: Path) -> None:
    _, audit = mined(tmp_path, number=2)
    audit["examples"][0]["query"] = "<script>alert(1)</script>"
    shown = page(audit)
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "http" not in shown


def test_what_the_texts_decide_is_refused_before_anything_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyEncoder, "encode", lambda *_: pytest.fail("encoded"))
    for says, rules in (
        (r"--first 400: the corpus has \d+ different documents", {"first": 400, "last": 500}),
        (r"line 1: the corpus has \d+ different documents and leaves .* --short keep", {"number": 160, "last": 300,
                                                                                      "short": "refuse"}),
    ):  # fmt: skip
        with pytest.raises(DataError, match=says):
            mined(tmp_path, **rules)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"choice": "best"}, "choose top or random"),
        ({"short": "no"}, "choose keep, drop or refuse"),
        ({"first": 5, "last": 5}, "must be the larger one"),
        ({"number": 200}, "leave 100 documents"),
        ({"margin": -1.0}, "0 or more"),
        ({"max_score": float("nan")}, "a number is expected"),
        ({"relative_margin": float("nan")}, "0 or more"),
        ({"keep_top": 101}, "more than --last"),
    ],
)
def test_rules_that_cannot_be_meant(rules: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Rules(**rules).check()


def _of_rank(folder: str, name: str) -> bytes:
    from capt.pretrain.retrieval import rankings

    room.load_text_encoder = lambda *_: ToyEncoder()  # type: ignore[assignment]
    rankings.BLOCK = 16
    home, out = Path(folder), Path(folder) / name
    options = EncodeOptions(str(out.with_suffix(".store")), tokens=40)
    mine([home / "pairs.jsonl"], home / "corpus.jsonl", Path("toy"), out, options, EncoderOptions(), Rules(number=5))
    return (out / "pairs.jsonl").read_bytes()


def test_ranks_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capt.pretrain.retrieval import rankings

    monkeypatch.setattr(rankings, "BLOCK", rankings.BLOCK)
    write_pairs(tmp_path)
    alone = _of_rank(str(tmp_path), "alone")
    assert run_ranks(_of_rank, 4, str(tmp_path), "ranks") == [alone] * 4


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capt: Capt) -> None:
    """From a BEIR folder to pairs with negatives, with a real folder of sentence-transformers."""
    monkeypatch.undo()
    model, beir = write_sentence_folder(tmp_path / "st"), write_beir(tmp_path / "beir")
    texts = [json.loads(line)["text"] for line in (beir / "corpus.jsonl").read_text().splitlines()]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"anchor": text, "positive": texts[i + 1]}) + "\n" for i, text in enumerate(texts[:9]))
    )
    words = ("mine", "--pairs", pairs, "--corpus", beir, "--model", model, "--number", "3",
             "--store", tmp_path / "store", "--out", tmp_path / "mined")  # fmt: skip
    code, out, _ = capt(*words)
    assert code == 0
    assert capt(*words)[0] == 2, "the folder is there"
    lines = [json.loads(line) for line in (tmp_path / "mined" / "pairs.jsonl").read_text().splitlines()]
    assert [len(line["neg"]) for line in lines] == [3] * 9
    assert lines[0]["query"] == texts[0]
    assert "9 of 9 rows" in out
