from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrain.base.errors import DataError
from pretrain.latent.ngram.arpa import read_arpa, write_arpa
from pretrain.latent.ngram.kneser_ney import FALLBACK, estimate

LMPLZ = Path(__file__).parent / "lmplz"

SMALL = """\
comments may come first
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1\t<unk>
0\t<s>\t-0.5
-0.25\t</s>
-0.75\ta\t-0.125

\\2-grams:
-0.0625\t<s> a
-0.5\ta </s>

\\end\\
"""


def test_reads_and_scores_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "small.arpa"
    path.write_text(SMALL)
    scores = read_arpa(path).score([["a"], ["a", "a"], ["x"]])
    # <s> a, a </s> | <s> a, back-off of a + a, a </s> | back-off of <s> + <unk>, no back-off of <unk> + </s>
    assert scores.log10.tolist() == [-0.0625, -0.5, -0.0625, -0.125 - 0.75, -0.5, -0.5 - 1, -0.25]
    assert scores.is_end.tolist() == [False, True, False, False, True, False, True]
    assert scores.is_unknown.tolist() == [False] * 5 + [True, False]
    assert scores.perplexity(ends=True) == pytest.approx(10 ** (3.75 / 7))
    assert scores.perplexity(ends=False, unknown=False) == pytest.approx(10 ** (1.0 / 3))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    text = [line.split() for line in (LMPLZ / "text.txt").read_text().splitlines()]
    model = estimate(text, order=4, fallback=FALLBACK)
    write_arpa(model, tmp_path / "model.arpa")
    again = read_arpa(tmp_path / "model.arpa")
    assert again.words == model.words
    for one, other in zip(again.levels, model.levels, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert np.allclose(one.log10, other.log10, rtol=1e-8, atol=1e-12)
        assert np.allclose(one.backoff, other.backoff, rtol=1e-8, atol=1e-12)
    write_arpa(again, tmp_path / "again.arpa")
    assert (tmp_path / "again.arpa").read_bytes() == (tmp_path / "model.arpa").read_bytes()


def test_a_level_without_ngrams(tmp_path: Path) -> None:
    model = estimate([["a"]], order=5, fallback=FALLBACK)
    write_arpa(model, tmp_path / "model.arpa")
    again = read_arpa(tmp_path / "model.arpa")
    assert np.allclose(again.score([["a", "a"]]).log10, model.score([["a", "a"]]).log10, rtol=1e-8)


def test_rows_of_lmplz_in_its_own_layout(tmp_path: Path) -> None:
    """Written back, the file of lmplz has the same lines but for its order and the digits."""
    write_arpa(read_arpa(LMPLZ / "order3.arpa"), tmp_path / "again.arpa")
    ours = sorted((tmp_path / "again.arpa").read_text().splitlines())
    theirs = sorted((LMPLZ / "order3.arpa").read_text().splitlines())
    assert ours == theirs


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\data\\\n", "", "the file ends"),
        ("ngram 1=4\nngram 2=2\n", "", "line 3: .*expected 'ngram 1="),
        ("ngram 2=2", "ngram 3=2", "line 4: .*expected 'ngram 2="),
        ("ngram 2=2", "ngram 2=3", "expected one of 3 2-grams"),
        ("ngram 2=2", "ngram 2=1", "expected an empty line"),
        ("-0.5\ta </s>", "-0.5\ta", "line 14: .*expected 2 words"),
        ("-0.5\ta </s>", "minus\ta </s>", "line 14: .*expected one of 2 2-grams"),
        ("-0.5\ta </s>", "-0.5\tb </s>", "not listed above"),
        ("-0.5\ta </s>", "-0.5\t<s> a", "listed twice"),
        ("-1\t<unk>", "-1\tb", "must hold <unk>, <s>, </s>"),
        ("-0.75\ta", "-0.75\t<s>", "must hold <unk>, <s>, </s>"),
        ("\\2-grams:", "\\3-grams:", "expected \\\\2-grams:"),
        ("\\end\\\n", "", "the file ends"),
        ("\\end\\\n", "\\3-grams:\n", "expected \\\\end"),
    ],
)
def test_damaged_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    path = tmp_path / "damaged.arpa"
    path.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(DataError, match=message) as error:
        read_arpa(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no ARPA file"):
        read_arpa(tmp_path / "absent.arpa")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="no ARPA file"):
        read_arpa(tmp_path / "binary")


def test_ngrams_over_the_start_of_a_sentence_are_never_used(tmp_path: Path) -> None:
    """Some tools count a text without breaking it into sentences."""
    path = tmp_path / "running.arpa"
    trigrams = "-0.1\t</s> <s>\t-0.2\n\n\\3-grams:\n-0.01\t</s> <s> a\n"
    path.write_text(SMALL.replace("ngram 2=2", "ngram 2=3\nngram 3=1").replace("a </s>\n", f"a </s>\n{trigrams}"))
    assert read_arpa(path).score([["a"], ["a"]]).log10.tolist() == [-0.0625, -0.5, -0.0625, -0.5]
