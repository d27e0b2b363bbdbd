"""Our files of vectors in gensim, gensim's in ours, and Spearman's rho of both.

gensim is no dependency of the project: ``CAPT_GENSIM`` names a Python interpreter that has it, in an environment of
its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.embeddings.neighbors import neighbors
from capt.pretrain.embeddings.similarity import read_set, score_analogies, score_set
from capt.pretrain.embeddings.vectors import WordVectors, read_vectors, write_vectors

GENSIM = os.environ.get("CAPT_GENSIM")
pytestmark = pytest.mark.skipif(GENSIM is None, reason="CAPT_GENSIM names no Python with gensim")

WORDS = ("the", "café", "1980", "\u00a0half", *(f"w{i}" for i in range(200)))
VECTORS = WordVectors(WORDS, np.random.default_rng(5).standard_normal((len(WORDS), 12)).astype(np.float32))

READ = """
import json, sys
from gensim.models import KeyedVectors
path, binary = sys.argv[1], sys.argv[2] == "True"
vectors = KeyedVectors.load_word2vec_format(path, binary=binary)
print(json.dumps([vectors.index_to_key, vectors.vectors.astype(float).tolist()]))
"""
WRITE = """
import sys
from gensim.models import KeyedVectors
vectors = KeyedVectors.load_word2vec_format(sys.argv[1])
vectors.save_word2vec_format(sys.argv[2], binary=sys.argv[3] == "True", write_header=sys.argv[4] == "True")
"""
MEASURE = """
import json, sys
from gensim.models import KeyedVectors
vectors = KeyedVectors.load_word2vec_format(sys.argv[1])
settings = dict(restrict_vocab=None, case_insensitive=False)
drop = vectors.evaluate_word_pairs(sys.argv[2], dummy4unknown=False, **settings)
zero = vectors.evaluate_word_pairs(sys.argv[2], dummy4unknown=True, **settings)
_, sections = vectors.evaluate_word_analogies(sys.argv[3], dummy4unknown=False, **settings)
near = vectors.most_similar("w3", topn=50)
print(json.dumps([drop[1][0], zero[1][0], drop[2], len(sections[-1]["correct"]), [w for w, _ in near]]))
"""


def gensim(script: str, *arguments: object) -> str:
    assert GENSIM is not None
    done = subprocess.run([GENSIM, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["v.txt", "v.txt.gz", "v.bin", "v.bin.gz"])
@pytest.mark.parametrize("form", ["word2vec", "gensim"])
def test_gensim_reads_our_files(form: str, name: str, tmp_path: Path) -> None:
    binary = ".bin" in name
    write_vectors(VECTORS, tmp_path / name, form, binary=binary)  # type: ignore[arg-type]
    words, matrix = json.loads(gensim(READ, tmp_path / name, binary))
    assert tuple(words) == WORDS
    np.testing.assert_array_equal(np.array(matrix, dtype=np.float32), VECTORS.matrix)


@pytest.mark.parametrize(("binary", "header"), [(False, True), (True, True), (False, False)])
def test_we_read_what_gensim_writes(binary: bool, header: bool, tmp_path: Path) -> None:
    write_vectors(VECTORS, tmp_path / "ours.txt", "gensim")
    gensim(WRITE, tmp_path / "ours.txt", tmp_path / "theirs", binary, header)
    vectors = read_vectors(tmp_path / "theirs")
    assert vectors.words == WORDS
    np.testing.assert_array_equal(vectors.matrix, VECTORS.matrix)
    if binary:
        write_vectors(VECTORS, tmp_path / "ours.bin", "gensim", binary=True)
        assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_gensim_measures_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    drawn = [(*rng.choice(240, 2, replace=False).tolist(), round(float(rng.random()) * 10, 1)) for _ in range(300)]
    pairs, questions = tmp_path / "pairs.tsv", tmp_path / "questions.txt"
    pairs.write_text("".join(f"w{a}\tw{b}\t{score}\n" for a, b, score in drawn))  # from w200 on unknown
    near = {word: neighbors(VECTORS, word, [range(1, 3)])[0] for word in WORDS[4:]}
    asked = [(f"w{i}", near[f"w{i}"][0].word, f"w{i + 1}", near[f"w{i + 1}"][0].word) for i in range(0, 180, 3)]
    asked = [words for words in asked if len(set(words)) == 4 and words[1].isascii() and words[3].isascii()]
    questions.write_text(": all\n" + "".join(" ".join(words) + "\n" for words in asked))
    write_vectors(VECTORS, tmp_path / "v.txt", "gensim")
    drop, zero, unknown, right, order = json.loads(gensim(MEASURE, tmp_path / "v.txt", pairs, questions))
    ours = score_set(VECTORS, read_set(pairs))
    assert ours.drop == pytest.approx(100 * drop, abs=1e-3)
    assert ours.zero == pytest.approx(100 * zero, abs=1e-3)
    assert 100 * (1 - ours.covered / ours.pairs) == pytest.approx(unknown)
    total = score_analogies(VECTORS, questions)["total"]
    assert total["right"] == right
    assert total["questions"] == len(asked) > 20
    assert [n.word for n in neighbors(VECTORS, "w3", [range(1, 51)])[0]] == order
