"""Readers of a run: its vectors, evaluation, conversion and generated negatives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.convert.dispatch import convert
from capt.pretrain.embeddings.evaluate import as_text
from capt.pretrain.embeddings.evaluate import command as evaluate
from capt.pretrain.embeddings.load import load_embeddings, load_tables
from capt.pretrain.embeddings.neighbors import distribution, load_generator, negatives_of
from capt.pretrain.embeddings.similarity import CASE_RULE
from capt.pretrain.embeddings.vectors import find_layout, read_vectors
from tests.families.words.unit.runs import WORDS, Tables, make_run, tables
from tests.support import Capt

PAIRS = "king\tqueen\t9\nKing\tman\t6\nqueen\twoman\t7\nking\tsword\t1\nking\tdragon\t5\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", {"discriminator": tables(1), "generator": tables(2)})


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "EN-FIVE.txt").write_text(PAIRS)
    return tmp_path / "sets"


def test_vectors_of_a_run_are_the_input_table(run: Path) -> None:
    for path in (run, run / "checkpoints" / "step-00000000"):
        vectors = load_embeddings(path)
        assert vectors.words == WORDS
        np.testing.assert_array_equal(vectors.matrix, tables(1).input.detach().numpy())
        assert vectors.context is not None
        np.testing.assert_array_equal(vectors.context, tables(1).context.detach().numpy())
    np.testing.assert_array_equal(load_generator(run).matrix, tables(2).input.detach().numpy())


def test_checkpoints_without_the_tables_are_refused(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", {"discriminator": tables(1)})
    with pytest.raises(CheckpointError, match=r"no module 'generator': it was trained with negatives\.sampler=noise"):
        load_generator(plain)
    with pytest.raises(CheckpointError, match="no module 'other'"):
        load_tables(plain, "other")
    short = make_run(tmp_path / "short", {"discriminator": tables(1, words=7)})
    with pytest.raises(CheckpointError, match=r"discriminator\.input is not a table of the 8 words of vocabulary\.txt"):
        load_embeddings(short)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        load_embeddings(tmp_path)


def test_evaluation_of_a_run_and_of_its_vector_file_agree(run: Path, pairs: Path, tmp_path: Path) -> None:
    of_run = evaluate(run, word_similarity=pairs, out=tmp_path / "out.json")
    written = convert(run, tmp_path / "v.txt", to="glove")
    of_file = evaluate(written, word_similarity=pairs / "EN-FIVE.txt")
    assert of_run["word_similarity"] == of_file["word_similarity"]
    five = of_run["word_similarity"]["FIVE"]
    assert (five["pairs"], five["covered"], five["known"], five["words"]) == (5, 4, 6, 7)
    assert json.loads((tmp_path / "out.json").read_text())["word_similarity"]["FIVE"] == five
    text = as_text(of_run)
    assert "4 (80%)" in text
    assert f"{five['drop']:.2f}" in text
    assert f"{five['zero']:.2f}" in text
    assert CASE_RULE in text


def test_the_run_keeps_what_was_measured_before(run: Path, pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("man\twoman\t9\nman\tparis\t1\n")
    (tmp_path / "questions.txt").write_text(": royal\nman king woman queen\n")
    evaluate(run, word_similarity=pairs)
    evaluate(run, word_similarity=tmp_path / "other.txt", analogies=tmp_path / "questions.txt")
    kept = json.loads((run / "evaluation-step-00000000.json").read_text())
    assert sorted(kept["word_similarity"]) == ["FIVE", "other"]
    assert kept["analogies"]["questions.txt"]["total"]["covered"] == 1


def test_nothing_to_measure_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --word-similarity DIR, --analogies FILE"):
        evaluate(run)
    (tmp_path / "none.txt").write_text("ja\tnein\t1\ndoch\toder\t2\n")
    with pytest.raises(DataError, match="none of the 2 word pairs"):
        evaluate(run, word_similarity=tmp_path / "none.txt")
    assert not (run / "evaluation-step-00000000.json").exists()


@pytest.mark.parametrize(
    ("to", "name", "layout"),
    [
        ("word2vec", "v.txt", (8, False)), ("word2vec", "v.bin", (8, True)), ("gensim", "v.bin.gz", (8, True)),
        ("gensim", "v.txt.gz", (8, False)), ("glove", "v.txt", (None, False)),
    ],
)  # fmt: skip
def test_conversion_and_back(to: str, name: str, layout: tuple[int | None, bool], run: Path, tmp_path: Path) -> None:
    out = convert(run, tmp_path / name, to=to)
    found = find_layout(out)
    assert (found.words, found.binary) == layout
    again = convert(out, tmp_path / "again.txt", to="gensim")  # a vector file is a source as well
    for path in (out, again):
        assert read_vectors(path).words == WORDS
        np.testing.assert_array_equal(read_vectors(path).matrix, load_embeddings(run).matrix)


def test_conversion_replaces_nothing_unasked(run: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "v.txt", tmp_path / "folder"
    out.write_text("precious")
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"v\.txt: exists; give another name, or --overwrite"):
        convert(run, out, to="glove")
    assert out.read_text() == "precious"
    convert(run, out, to="glove", overwrite=True)
    assert read_vectors(out).words == WORDS
    with pytest.raises(CheckpointError, match="a folder; word vectors are one file"):
        convert(run, folder, to="glove", overwrite=True)
    with pytest.raises(ConfigError, match="'hf' is unknown; a checkpoint of task ace can be written as word2vec"):
        convert(run, tmp_path / "hf", to="hf")
    with pytest.raises(DataError, match="GloVe's form is text"):
        convert(run, tmp_path / "v.bin", to="glove")
    assert not (tmp_path / "v.bin").exists()


def test_generated_negatives_follow_the_generators_softmax(run: Path) -> None:
    generator = load_generator(run)
    assert generator.context is not None
    scores = [float(np.float64(generator.matrix[5]) @ np.float64(row)) for row in generator.context]
    literal = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(distribution(generator, 5), literal, rtol=1e-5)
    found = negatives_of(generator, "SWORD", 3, seed=1)
    assert [n.word for n in found.hard] == [WORDS[i] for i in np.argsort(-literal)[:3]]
    assert found.entropy == pytest.approx(float(-(literal * np.log(literal)).sum()), rel=1e-5)
    assert not {n.word for n in found.hard} & {n.word for n in found.easy}
    assert found == negatives_of(generator, "sword", 3, seed=1)
    with pytest.raises(DataError, match="no vector for 'swords' among 8 words; did you mean 'sword'"):
        negatives_of(generator, "swords", 3, seed=1)


def test_easy_negatives_are_drawn_and_a_collapsed_generator_draws_none(tmp_path: Path) -> None:
    words = tuple(f"w{i}" for i in range(1000))
    spread = make_run(tmp_path / "spread", {"generator": Tables(np.zeros((1000, 2)), np.zeros((1000, 2)))}, words)
    drawn = negatives_of(load_generator(spread), "w0", 400, seed=1).easy
    rows = np.array([int(n.word[1:]) for n in drawn])
    assert len(drawn) == 400  # uniform: of all words but the 400 of `hard`, in no order
    assert abs(rows.mean() - 699.5) < 4 * 173 / 20
    peak = np.zeros((1000, 2))
    peak[7] = 1000
    gone = make_run(tmp_path / "gone", {"generator": Tables(np.ones((1000, 2)), peak)}, words)
    found = negatives_of(load_generator(gone), "w0", 3, seed=1)
    assert found.hard[0].word == "w7"
    assert found.easy == []
    assert found.entropy == 0


def test_the_command_line(run: Path, pairs: Path, tmp_path: Path, capt: Capt) -> None:
    code, out, _ = capt("evaluate", run, "--word-similarity", pairs, "--json")
    assert code == 0
    assert json.loads(out)["word_similarity"]["FIVE"]["covered"] == 4
    code, out, _ = capt("convert", run, tmp_path / "v.bin", "--to", "gensim")
    assert (code, out.strip()) == (0, str(tmp_path / "v.bin"))
    code, out, _ = capt("evaluate", tmp_path / "v.bin", "--word-similarity", pairs)
    assert code == 0
    assert "FIVE" in out
    code, out, _ = capt("embeddings", "neighbors", run, "queen", "king", "--top", "2", "--also", "5-6")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "queen"
    assert lines[2].startswith("  5-6     ")
    assert len(lines) == 6
    code, out, _ = capt("embeddings", "neighbors", run, "queen", "--also", "10000-10001")
    assert "  10000-10001  only 8 words" in out.splitlines()
    code, out, _ = capt("embeddings", "negatives", run, "sword", "-n", "2", "--json")
    assert len(json.loads(out)[0]["hard"]) == 2
    code, _, err = capt("embeddings", "neighbors", run, "queens")
    assert code == 2
    assert err.startswith("error: no vector for 'queens' among 8 words; did you mean 'queen'?")
    code, _, err = capt("evaluate", run, "--word-similarity", pairs, "--out", tmp_path)
    assert (code, err) == (2, f"error: {tmp_path} is a folder: name a file to write\n")
    code, _, err = capt("evaluate", run, "--sts", pairs)
    assert (code, "--sts has no meaning for a checkpoint of task ace" in err) == (2, True)
