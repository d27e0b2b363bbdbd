"""Fine-tuned vectors keep the words that the text lacks, as they were, and learn what they learn without them."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.embeddings.evaluate import command as evaluate
from capt.pretrain.embeddings.export import command as export
from capt.pretrain.embeddings.load import GENERATOR, load_embeddings, load_tables
from capt.pretrain.embeddings.vectors import WordVectors, read_vectors, write_vectors
from capt.pretrain.engine.run import run_job
from tests.embeddings import small_job, write_text
from tests.support import run_ranks

DROP = ("model.other_words=drop",)


def _vectors(folder: Path) -> WordVectors:
    """Vectors of half of the text's words, among many others: rare ones, two with spaces, one in upper case."""
    known = sorted(set(write_text(folder / "text.txt").read_text().split()))[::2]
    words = [*known, *(f"rare{number}" for number in range(70)), ". . .", "at name@domain.com", known[-1].upper()]
    draw = np.random.default_rng(0)
    draw.shuffle(words)
    return WordVectors(tuple(words), draw.normal(size=(len(words), 12)).astype(np.float32))


def _runs(folder: Path, runs: list[tuple[str, bool, tuple[str, ...]]]) -> list[int | str]:
    quiet_libraries(debug=False)
    logging.getLogger("capt").setLevel(logging.INFO)
    codes: list[int | str] = []
    for name, resume, more in runs:
        init = f"model.init={folder / 'vectors.txt'}"
        settings = [init, "model.freeze_input=1", "generator.every=2", "generator.samples=3", *more]
        try:
            codes.append(run_job(small_job(folder, folder / name, *settings, preset="finetune"), resume=resume))
        except CheckpointError as error:
            codes.append(str(error))
    return codes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_vectors(_vectors(folder), folder / "vectors.txt", "glove")
    part = ("schedule.stop_after=3",)
    runs = [
        ("one", False, part), ("one", True, ()),
        ("drop", False, (*DROP, *part)), ("drop", True, ()), ("drop", True, DROP),
    ]  # fmt: skip
    (codes,) = run_ranks(_runs, 1, folder, runs, timeout=240)
    assert codes[:3] == [75, 0, 75]
    assert "model.other_words=drop continues it" in codes[3], "as that of an earlier version"
    assert codes[4] == 0
    assert run_ranks(_runs, 2, folder, [("two", False, ())], timeout=240) == [[0], [0]]
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_word_of_the_file_is_there_and_those_that_the_text_lacks_are_as_they_were(
    name: str, trained: Path
) -> None:
    given, tuned, dropped = (load_embeddings(trained / each) for each in ("vectors.txt", name, "drop"))
    assert set(tuned.words) == set(given.words) | set(dropped.words)
    others = [word for word in given.words if word not in dropped.index]
    assert len(others) >= 73
    for word in others:
        assert np.array_equal(tuned.matrix[tuned.index[word]], given.matrix[given.index[word]]), word
    moved = [word for word in given.words if word in dropped.index]
    assert not any(np.array_equal(tuned.matrix[tuned.index[word]], given.matrix[given.index[word]]) for word in moved)
    # What the text teaches is to the last digit what it teaches without the other words, on one rank.
    assert tuned.words[: len(dropped)] == dropped.words
    for ours, theirs in ((tuned.matrix, dropped.matrix), (tuned.context, dropped.context)):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours[: len(dropped)], theirs, rtol=0, atol=0 if name != "two" else 1e-6)
    generators = [load_tables(trained / each, GENERATOR) for each in (name, "drop")]
    assert generators[0].words == generators[1].words == dropped.words


def test_the_same_pairs_are_measured_before_and_after(trained: Path, tmp_path: Path) -> None:
    given = read_vectors(trained / "vectors.txt")
    words = [word for word in given.words if " " not in word]
    pairs = list(pairwise(words))
    (tmp_path / "set.txt").write_text("".join(f"{a}\t{b}\t{i % 7}\n" for i, (a, b) in enumerate(pairs)))
    exported = export(trained / "one", tmp_path / "tuned.txt", to="glove")
    for source in (trained / "vectors.txt", trained / "one", exported):
        (row,) = evaluate(source, word_similarity=tmp_path / "set.txt")["word_similarity"].values()
        assert (row["pairs"], row["covered"]) == (len(pairs), len(pairs))
    (row,) = evaluate(trained / "drop", word_similarity=tmp_path / "set.txt")["word_similarity"].values()
    assert row["covered"] < len(pairs) / 10


def test_the_log_says_how_many(trained: Path) -> None:
    given, dropped = load_embeddings(trained / "vectors.txt"), load_embeddings(trained / "drop")
    known = len(set(given.words) & set(dropped.words))
    start = f"{known} of the text's {len(dropped)} words start from model.init {trained / 'vectors.txt'}; of its "
    for name, kept in (("one", len(given) - known), ("drop", 0)):
        lacked = len(given) - known
        said = f"{lacked} words that are not in the text {kept} keep their vectors, untrained, and {lacked - kept} are"
        assert any(start + said in path.read_text() for path in (trained / name).rglob("*.log")), name
