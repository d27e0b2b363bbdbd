"""STS: the correlation, the protocol (concatenation, order, whitespace), the file layouts and their errors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from capt.pretrain.base.errors import DataError
from capt.pretrain.data.sts_files import SUBSETS, Pairs, find_sets
from capt.pretrain.language.sts import encode_texts, score, score_rows

ROWS = [
    ("A man is  dancing .", "A man dances .", 5.0),
    ('The "cat sat', "A dog ran away from the house .", 0.4),
    ("Rain falls .", "It rains .", 4.2),
    ("A plane takes off .", "An air plane is taking off .", 4.8),
    ("Two boys play football .", "A woman cuts an onion .", 0.0),
]


def bag(texts: list[str]) -> np.ndarray:
    """A deterministic encoder: character counts."""
    return np.array([[text.lower().count(letter) + 0.1 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


def write_glue(folder: Path, split: str = "dev", rows: list = ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["index\tgenre\tsentence1\tsentence2\tscore"]
    lines += [f"{i}\tnews\t{a}\t{b}\t{gold}" for i, (a, b, gold) in enumerate(rows)]
    path = folder / f"{split}.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_original(path: Path, rows: list = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"news\tMSRpar\t2012\t{i:04}\t{gold}\t{a}\t{b}" for i, (a, b, gold) in enumerate(rows)]
    lines[1] += "\tsource one\tsource two"
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    return path


def write_year(root: Path, year: str, empty_gold: bool = False) -> list[tuple[str, str, float]]:
    folder = root / "STS" / f"{year}-en-test"
    folder.mkdir(parents=True)
    kept = []
    for shift, subset in enumerate(SUBSETS[year]):
        rows = ROWS[shift % 5 :] + ROWS[: shift % 5]
        golds = [str(gold) for _, _, gold in rows]
        if empty_gold:
            golds[-1] = ""
        (folder / f"STS.input.{subset}.txt").write_text("".join(f"{a}\t{b}\n" for a, b, _ in rows), encoding="utf-8")
        (folder / f"STS.gs.{subset}.txt").write_text("\n".join(golds) + "\n", encoding="utf-8")
        kept += rows[:-1] if empty_gold else rows
    return kept


def by_hand(rows: list) -> float:
    """Pearson of ranks, one pair at a time."""
    cosines = []
    for a, b, _ in rows:
        x, y = bag([" ".join(a.split())])[0], bag([" ".join(b.split())])[0]
        cosines.append(x @ y / np.sqrt((x @ x) * (y @ y)))
    return float(np.corrcoef(rankdata(cosines), rankdata([gold for _, _, gold in rows]))[0, 1])


def test_score_is_the_rank_correlation_of_cosines(tmp_path: Path) -> None:
    write_glue(tmp_path)
    (dev,) = find_sets(tmp_path)
    assert (dev.name, dev.split, len(dev.gold)) == ("STS-B", "dev", 5)
    assert dev.first[0] == "A man is dancing ."
    found = score(dev, bag)
    assert found["spearman"] == pytest.approx(by_hand(ROWS), rel=1e-12)
    assert found["pairs"] == 5
    first, second = (torch.tensor(bag(side)) for side in (dev.first, dev.second))
    unit_first, unit_second = (x / x.norm(dim=1, keepdim=True) for x in (first, second))
    close = dev.gold > 4
    assert found["alignment"] == pytest.approx(float((unit_first - unit_second)[close].square().sum(1).mean()))
    everything = torch.cat((unit_first, unit_second))
    assert found["uniformity"] == pytest.approx(float(torch.pdist(everything).square().mul(-2).exp().mean().log()))


def test_all_means_the_concatenation_of_the_subsets(tmp_path: Path) -> None:
    rows = write_year(tmp_path, "STS12", empty_gold=True)
    (found,) = find_sets(tmp_path)
    assert (found.name, len(found.gold)) == ("STS12", 4 * len(SUBSETS["STS12"]))
    assert score(found, bag)["spearman"] == pytest.approx(by_hand(rows), rel=1e-12)


def test_every_layout_is_found(tmp_path: Path) -> None:
    for year in SUBSETS:
        write_year(tmp_path, year)
    for split in ("train", "dev", "test"):
        write_original(tmp_path / "STS/STSBenchmark" / f"sts-{split}.csv")
    sick = tmp_path / "SICK/SICK_test_annotated.txt"
    sick.parent.mkdir()
    lines = [f"{i}\t{a}\t{b}\t{max(1, gold)}\tNEUTRAL" for i, (a, b, gold) in enumerate(ROWS)]
    sick.write_text("pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n" + "\n".join(lines))
    names = [(pairs.name, pairs.split) for pairs in find_sets(tmp_path)]
    assert names == [*((year, "test") for year in SUBSETS), ("STS-B", "dev"), ("STS-B", "test"), ("SICK-R", "test")]
    assert [pairs.split for pairs in find_sets(tmp_path, splits=("train",))] == ["train"]


def test_glue_folder_takes_its_test_scores_from_the_original_file(tmp_path: Path) -> None:
    write_glue(tmp_path / "STS-B", "dev")
    write_glue(tmp_path / "STS-B", "test", [(a, b, "") for a, b, _ in ROWS])
    assert [pairs.split for pairs in find_sets(tmp_path)] == ["dev"]
    write_original(tmp_path / "STS-B/original/sts-test.tsv")
    found = find_sets(tmp_path)
    assert [pairs.split for pairs in found] == ["dev", "test"]
    assert found[1].second[2] == "It rains ."
    assert found[1].first == found[0].first


def test_order_and_batches_do_not_change_the_score() -> None:
    """An encoder that pads: same text, same vector, but only if the rows come back in the right order."""
    rng = np.random.default_rng(0)
    words = [f"word{letter}" for letter in "abcdefghijklmnopqrs"]
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 25))) for _ in range(120)]
    gold = rng.uniform(0, 5, size=60)
    pairs = Pairs("STS-B", "dev", texts[:60], texts[60:], gold)
    torch.manual_seed(0)
    table = torch.nn.Embedding(len(words) + 1, 16, padding_idx=0)

    def padding_encoder(batch: list[str]) -> np.ndarray:
        ids = [[words.index(word) + 1 for word in text.split()] for text in batch]
        padded = torch.tensor([row + [0] * (max(map(len, ids)) - len(row)) for row in ids])
        with torch.no_grad():
            return (table(padded).sum(1) / (padded > 0).sum(1, keepdim=True)).numpy()

    one_by_one = np.concatenate([padding_encoder([text]) for text in texts])
    np.testing.assert_allclose(encode_texts(texts, padding_encoder, 7), one_by_one, atol=1e-6)
    scores = [score(pairs, padding_encoder, batch)["spearman"] for batch in (1, 7, 1000)]
    shuffle = rng.permutation(60)
    shuffled = Pairs("STS-B", "dev", [texts[i] for i in shuffle], [texts[60 + i] for i in shuffle], gold[shuffle])
    assert [*scores, score(shuffled, padding_encoder, 7)["spearman"]] == pytest.approx([scores[0]] * 4, abs=1e-6)


def test_each_distinct_text_is_encoded_once() -> None:
    seen: list[str] = []

    def counting(batch: list[str]) -> np.ndarray:
        seen.extend(batch)
        return bag(batch)

    encode_texts(["b b", "a", "b b", "a"], counting, batch=1)
    assert seen == ["a", "b b"]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda texts: np.ones((len(texts), 3)), "collapsed"),
        (lambda texts: np.zeros((len(texts), 3)), "zeros"),
        (lambda texts: np.full((len(texts), 3), np.nan), "not finite"),
        (lambda texts: np.ones((1, 3)), "expected a row each"),
    ],
)
def test_a_broken_encoder_is_named(encoder, message: str) -> None:
    first, second, gold = zip(*ROWS, strict=True)
    with pytest.raises(ValueError, match=message):
        score(Pairs("STS-B", "dev", list(first), list(second), np.array(gold)), encoder)


@pytest.mark.parametrize(
    ("rows", "gold", "message"),
    [
        (np.ones((4, 3)), [1, 2], "STS-B dev: all cosines are 1; the encoder has collapsed"),
        (np.zeros((4, 3)), [1, 2], "STS-B dev: the encoder returned a vector of zeros"),
        (np.eye(4, 3) + 0.1, [3, 3], "STS-B dev: every score is 3, with which nothing correlates"),
    ],
)
def test_what_has_no_correlation_is_said_in_a_line(rows: np.ndarray, gold: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_rows(Pairs("STS-B", "dev", ["a", "b"], ["c", "d"], np.array(gold, dtype=float)), rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5\tnews\tone\ttwo", "line 4: 4 columns; the header has 5"),
        ("5\tnews\tone\ttwo\tfive", "line 4: score 'five' is not a number"),
        ("5\tnews\tone\ttwo\t5.1", "line 4: score 5.1 is outside 0 to 5"),
        ("5\tnews\tone\ttwo\t-1", "line 4: score -1 is outside"),
        ("5\tnews\tone\ttwo\tnan", "line 4: score nan is outside"),
        ("5\tnews\tone\t \t3", "line 4: a sentence is empty"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write_glue(tmp_path, rows=ROWS[:2])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=f"dev.tsv, {message}"):
        find_sets(tmp_path)


def test_errors_about_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_sets(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no STS set"):
        find_sets(tmp_path)
    path = tmp_path / "dev.tsv"
    path.write_text("\n")
    with pytest.raises(DataError, match="the file is empty"):
        find_sets(tmp_path)
    path.write_text("sentence\tlabel\nfine\t1\n")
    with pytest.raises(DataError, match="line 1: no column sentence1, sentence2, score; the header has"):
        find_sets(tmp_path)
    write_glue(tmp_path, rows=ROWS[:1])
    with pytest.raises(DataError, match="1 scored pairs"):
        find_sets(tmp_path)
    path.write_bytes(b"sentence1\tsentence2\tscore\n\xff\t\xfe\t1\n")
    with pytest.raises(DataError, match="not UTF-8"):
        find_sets(tmp_path)
    for content, message in (
        (b"sentence1\tsentence2\tscore\ra\tb\t1\r", "carriage returns alone"),
        (b"sentence1\tsentence2\tscore\na\0\tb\t1\n", "line 2: binary, not text"),
        (b"score\tsentence1\tsentence2\tscore\n1\ta\tb\t2\n", "line 1: two columns have the name 'score'"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            find_sets(tmp_path)
    write_original(path := tmp_path / "sts-test.tsv")
    path.write_text("only\tthree\tcolumns\n")
    with pytest.raises(DataError, match="line 1: 3 columns; STS-B's own files have 7"):
        find_sets(tmp_path, splits=("test",))


def test_errors_of_the_senteval_layout(tmp_path: Path) -> None:
    write_year(tmp_path, "STS13")
    folder = tmp_path / "STS/STS13-en-test"
    (folder / "STS.gs.FNWN.txt").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"STS.gs.FNWN.txt: 2 lines, but STS.input.FNWN.txt has 5"):
        find_sets(tmp_path)
    (folder / "STS.input.FNWN.txt").write_text("one\ttwo\nthree\n")
    with pytest.raises(DataError, match=r"STS.input.FNWN.txt, line 2: 1 columns"):
        find_sets(tmp_path)
    (folder / "STS.gs.FNWN.txt").unlink()
    with pytest.raises(DataError, match=r"STS.gs.FNWN.txt: no such file"):
        find_sets(tmp_path)


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA is not set: no real STS-B files")
def test_real_stsb() -> None:
    folder = Path(os.environ["CAPT_DATA"]) / "glue"
    sets = {pairs.split: pairs for pairs in find_sets(folder, splits=("train", "dev", "test"))}
    assert {split: len(pairs.gold) for split, pairs in sets.items()} == {"train": 5749, "dev": 1500, "test": 1379}
    assert sets["test"].first[0] == "A girl is styling her hair."
    # a bag of letters is a weak encoder, and anything but a misaligned file gives it a clearly positive correlation
    assert 0.3 < score(sets["test"], bag)["spearman"] < 0.7
