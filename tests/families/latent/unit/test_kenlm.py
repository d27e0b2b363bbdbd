from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.latent import kenlm, ngram
from capt.pretrain.latent.kenlm import KenLM, Programs, find_programs
from capt.pretrain.latent.ngram import FALLBACK, NGramModel, Text
from tests.families.latent.unit.arpa import read_arpa

LMPLZ = Path(__file__).parent / "lmplz"


def sentences(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def programs() -> Programs:
    try:
        return find_programs()
    except ConfigError as error:
        pytest.skip(str(error))


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_programs_are_found_in_the_named_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "lmplz", ":")
    with pytest.raises(ConfigError, match=rf"query is not in {tmp_path}: run 'make kenlm'.*builtin"):
        find_programs(tmp_path)
    program(tmp_path / "query", ":")
    assert find_programs(tmp_path) == Programs(tmp_path / "lmplz", tmp_path / "query")

    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(sys, "executable", str(other / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_programs().lmplz == tmp_path / "lmplz", "on PATH"
    with pytest.raises(ConfigError, match="lmplz is not in"):
        find_programs(other)
    program(other / "lmplz", ":")
    assert find_programs().lmplz == other / "lmplz", "what stands beside the interpreter comes first"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"query is not in .* or on PATH: run 'make kenlm'"):
        find_programs()


def test_what_query_prints_is_read(tmp_path: Path) -> None:
    """ExpectedFile from query; the built-in model of the same text says the same."""
    query = program(tmp_path / "query", f"cat > {tmp_path}/asked; cat {LMPLZ}/scored.query")
    text = sentences(LMPLZ / "scored.txt")
    theirs = KenLM(tmp_path / "model.arpa", Programs(query, query)).score(text)
    assert (tmp_path / "asked").read_text() == (LMPLZ / "scored.txt").read_text()
    ours = ngram.estimate(sentences(LMPLZ / "text.txt"), fallback=FALLBACK).score(text)
    assert np.allclose(ours.log10, theirs.log10, rtol=0, atol=1e-5)
    assert ours.is_unknown.tolist() == theirs.is_unknown.tolist()
    assert ours.is_end.tolist() == theirs.is_end.tolist()
    assert theirs.log10[:3].tolist() == [-0.31909072, -1.2675041, -0.40577874]


def test_what_lmplz_is_asked(tmp_path: Path) -> None:
    lmplz = program(tmp_path / "lmplz", f'echo "$@" > {tmp_path}/asked; cat > {tmp_path}/text')
    kenlm.estimate([["a", "b"], []], tmp_path / "m.arpa", Programs(lmplz, lmplz), order=3, fallback=FALLBACK)
    asked = (tmp_path / "asked").read_text()
    assert asked == (
        f"-o 3 -S 20% -T {tmp_path} --skip_symbols --arpa {tmp_path}/m.arpa --discount_fallback 0.5 1 1.5\n"
    )
    assert (tmp_path / "text").read_text() == "a b\n\n"


def test_a_program_that_fails(tmp_path: Path) -> None:
    failing = program(tmp_path / "lmplz", "cat > /dev/null; echo reason >&2; echo advice >&2; exit 3")
    with pytest.raises(DataError, match=r"lmplz .*exit code 3: reason advice"):
        kenlm.estimate([["a"]], tmp_path / "m.arpa", Programs(failing, failing))
    with pytest.raises(DataError, match="'a b' is not one word"):
        kenlm.estimate([["a b"]], tmp_path / "m.arpa", Programs(failing, failing))
    with pytest.raises(ConfigError, match="order 1"):
        kenlm.estimate([["a"]], tmp_path / "m.arpa", Programs(failing, failing), order=1)


def agree(ours: NGramModel, theirs: NGramModel) -> None:
    assert ours.words == theirs.words
    for mine, level in zip(ours.levels, theirs.levels, strict=True):
        assert np.array_equal(mine.keys, level.keys)
        assert np.abs(mine.log10 - level.log10).max(initial=0.0) < 1e-3
        assert np.abs(mine.backoff - level.backoff).max(initial=0.0) < 1e-3


def generated(number: int) -> Text:
    """Sentences of Zipf-distributed words, each word drawn by the one before it."""
    generator = np.random.default_rng(7)
    ranks = np.minimum(generator.zipf(1.4, size=(number, 12)), 400)
    lengths = generator.integers(0, 12, size=number)
    return [[f"w{r * (1 + r % 3)}" for r in row[:length]] for row, length in zip(ranks, lengths, strict=True)]


@pytest.mark.parametrize(
    ("number", "order", "fallback"), [(2000, 5, None), (300, 5, FALLBACK), (300, 2, FALLBACK), (3, 4, (0.3, 0.6, 2.5))]
)
def test_same_model_as_lmplz(
    programs: Programs, tmp_path: Path, number: int, order: int, fallback: tuple[float, float, float] | None
) -> None:
    text = generated(number)
    kenlm.estimate(text, tmp_path / "m.arpa", programs, order, fallback)
    agree(ngram.estimate(text, order, fallback), read_arpa(tmp_path / "m.arpa"))


def test_same_scores_as_query(programs: Programs, tmp_path: Path) -> None:
    text, scored = (
        generated(2000),
        [*sentences(LMPLZ / "scored.txt"), *generated(40), ["w1", "<s>", "w2", "</s>", "w1"]],
    )
    theirs = kenlm.estimate(text, tmp_path / "m.arpa", programs).score(scored)
    ours = ngram.estimate(text).score(scored)
    assert np.abs(ours.log10 - theirs.log10).max() < 1e-3
    assert ours.is_unknown.tolist() == theirs.is_unknown.tolist()
    assert ours.is_end.tolist() == theirs.is_end.tolist()


def test_lmplz_refuses_what_the_builtin_refuses(programs: Programs, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="discount_fallback"):
        kenlm.estimate([["a", "a"]], tmp_path / "m.arpa", programs)
    with pytest.raises(DataError, match="discount_fallback"):
        ngram.estimate([["a", "a"]])
