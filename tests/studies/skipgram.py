"""Does a pass of ``ace/skipgram`` teach as much as a pass of gensim? By held-out loss, and by word similarity.

``CAPT_DATA=... python -m tests.studies.skipgram --gensim-python E/bin/python --out runs/skipgram`` trains both sides
with 300 dimensions, window 5, 5 negatives, subsampling 1e-3 and one thread, on three texts, for 1, 3 and 5 epochs and
three seeds, and writes ``trials.jsonl`` (a row for each finished training; the same command continues) and
``table.md``.

The held-out loss is that of skip-gram with negative sampling (Mikolov et al. 2013, equation 4) in nats a pair, on pairs
of a text that neither side has read, with the same five noise words for both. Spearman's rho times 100 is taken for
every set of word pairs by the rule ``drop``, and averaged over the sets with their covered pairs as weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from capt.pretrain.embeddings.load import load_tables
from capt.pretrain.embeddings.similarity import find_sets, score_sets
from capt.pretrain.embeddings.vectors import WordVectors
from tests.realdata import real_data
from tests.studies.support import finish, newest_checkpoint, same_settings

DIM, WINDOW, NEGATIVES, SUBSAMPLE, MIN_COUNT, PAIRS = 300, 5, 5, 1e-3, 5, 60_000
TEXTS = {"books 0": "books.train.00.txt.gz", "books 1": "books.train.01.txt.gz", "brown": "brown.txt.gz"}
HELD_OUT = "books.valid.txt.gz"
GENSIM = """
import json, sys
import numpy
from gensim.models import word2vec
job, out = json.loads(sys.argv[1]), sys.argv[2]
model = word2vec.Word2Vec(sg=1, hs=0, alpha=0.025, min_alpha=1e-4, workers=1, **job)
numpy.savez(out, matrix=model.wv.vectors, context=model.syn1neg, words=numpy.array(model.wv.index_to_key))
"""


def words_of(source: Path, target: Path) -> None:
    """Write the words of a text, runs of letters in lower case, a paragraph a line; what is there stays."""
    if target.exists():
        return
    partial = target.with_suffix(".part")
    with gzip.open(source, "rt", encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as out:
        for line in lines:
            if words := re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", line.lower().replace("\u2019", "'")):
                out.write(" ".join(words) + "\n")
    partial.rename(target)


class HeldOutLoss:
    """The loss of skip-gram with negative sampling on pairs of a held-out text, the same for every table.

    Args:
        training: the words that were trained on: their counts decide vocabulary, subsampling and noise.
        text: the held-out text.
    """

    def __init__(self, training: Path, text: Path) -> None:
        counts = Counter(training.read_text(encoding="utf-8").split())
        self._words = sorted(word for word, count in counts.items() if count >= MIN_COUNT)
        numbers = np.array([counts[word] for word in self._words], dtype=np.float64)
        share = numbers / numbers.sum()
        keep = np.minimum(1, (np.sqrt(share / SUBSAMPLE) + 1) * SUBSAMPLE / share)
        row = {word: i for i, word in enumerate(self._words)}
        random, pairs = np.random.default_rng(0), []
        for line in text.read_text(encoding="utf-8").splitlines():
            kept = [row[word] for word in line.split() if word in row and random.random() < keep[row[word]]]
            for i, centre in enumerate(kept):
                reach = int(random.integers(1, WINDOW + 1))
                pairs += [(centre, kept[j]) for j in range(max(0, i - reach), min(len(kept), i + reach + 1)) if j != i]
        self._pairs = np.array(pairs)[random.permutation(len(pairs))[:PAIRS]]
        noise = numbers**0.75
        self._noise = random.choice(len(self._words), (len(self._pairs), NEGATIVES), p=noise / noise.sum())

    def of(self, vectors: WordVectors) -> float:
        """Return the loss of vectors and their context table, in nats a pair."""
        order = np.array([vectors.index[word] for word in self._words])
        assert vectors.context is not None
        x = vectors.matrix[order[self._pairs[:, 0]]].astype(np.float64)
        positive = np.einsum("nd,nd->n", x, vectors.context[order[self._pairs[:, 1]]])
        negative = [np.einsum("nd,nd->n", x, vectors.context[order[noise]]) for noise in self._noise.T]
        return float(np.logaddexp(0, -positive).mean() + sum(np.logaddexp(0, each).mean() for each in negative))


def train_gensim(python: Path, text: Path, epochs: int, seed: int, out: Path) -> WordVectors:
    """Train with gensim, in its own environment."""
    tables = out / "tables.npz"
    if not tables.exists():
        job = {
            "corpus_file": str(text), "vector_size": DIM, "window": WINDOW, "negative": NEGATIVES, "sample": SUBSAMPLE,
            "min_count": MIN_COUNT, "epochs": epochs, "seed": seed,
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        part = out / "part.npz"
        subprocess.run([str(python), "-c", GENSIM, json.dumps(job), str(part)], check=True)
        part.rename(tables)
    with np.load(tables) as found:
        return WordVectors(tuple(found["words"].tolist()), found["matrix"], found["context"])


def train_ours(text: Path, epochs: int, seed: int, out: Path) -> WordVectors:
    """Train the shipped job."""
    finish(
        out, "pretrain", "ace/skipgram", f"data.files={text}", f"data.cache={out.parent / 'cache'}",
        f"data.window={WINDOW}", f"data.subsample={SUBSAMPLE}", f"data.min_count={MIN_COUNT}", f"model.dim={DIM}",
        f"negatives.number={NEGATIVES}", f"schedule.epochs={epochs}", f"run.seed={seed}", "run.threads=1",
        "run.tensorboard=false", "checkpoint.every=0",
    )  # fmt: skip
    return load_tables(newest_checkpoint(out), "discriminator")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of means over seeds, in Markdown; a cell without a trial has a dash."""
    lines = ["| text | epochs | seeds | held-out loss: gensim | ours | mean rho: gensim | ours |", "|---" * 7 + "|"]
    for text, epochs in dict.fromkeys((row["text"], row["epochs"]) for row in rows):
        sides = {
            side: [row for row in rows if (row["text"], row["epochs"], row["side"]) == (text, epochs, side)]
            for side in ("gensim", "ours")
        }
        cells = [
            f"{fmean(row[key] for row in found):.{digits}f}" if found else "-"
            for key, digits in (("loss", 4), ("rho", 1)) for found in sides.values()
        ]  # fmt: skip
        seeds = "/".join(str(len(found)) for found in sides.values())
        lines.append(f"| {text} | {epochs} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Train and measure what is missing, one after the other, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gensim-python", type=Path, required=True, help="Python of an environment with gensim 4.4")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3, 5])
    options = parser.parse_args()
    data = real_data(parser, "corpus", "wordsim")
    out = options.out
    same_settings(out, {"dim": DIM, "window": WINDOW, "negatives": NEGATIVES, "subsample": SUBSAMPLE})
    trials, sets = out / "trials.jsonl", find_sets(data / "wordsim")
    rows = [json.loads(line) for line in trials.read_text().splitlines()] if trials.exists() else []
    done = {(row["side"], row["text"], row["epochs"], row["seed"]) for row in rows}
    words_of(data / "corpus" / HELD_OUT, out / "held-out.txt")
    for seed in range(1, options.seeds + 1):
        for name, file in TEXTS.items():
            text = out / f"{file.split('.txt')[0]}.txt"
            words_of(data / "corpus" / file, text)
            held_out: HeldOutLoss | None = None
            for epochs in options.epochs:
                for side in ("gensim", "ours"):
                    if (side, name, epochs, seed) in done:
                        continue
                    folder = out / f"{side}-{text.stem}-{epochs}-{seed}"
                    if side == "gensim":
                        vectors = train_gensim(options.gensim_python, text, epochs, seed, folder)
                    else:
                        vectors = train_ours(text, epochs, seed, folder)
                    held_out = held_out or HeldOutLoss(text, out / "held-out.txt")
                    scores = {each: score for each, score in score_sets(vectors, sets).items() if score["covered"] > 1}
                    weights = sum(score["covered"] for score in scores.values())
                    row = {
                        "side": side, "text": name, "epochs": epochs, "seed": seed, "loss": held_out.of(vectors),
                        "rho": sum(score["drop"] * score["covered"] for score in scores.values()) / weights,
                        "sets": {each: round(score["drop"], 2) for each, score in scores.items()},
                    }  # fmt: skip
                    rows.append(row)
                    with trials.open("a", encoding="utf-8") as file_:
                        file_.write(json.dumps(row) + "\n")
    rows.sort(key=lambda row: (list(TEXTS).index(row["text"]), row["epochs"], row["side"], row["seed"]))
    (out / "table.md").write_text(table(rows), encoding="utf-8")
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
