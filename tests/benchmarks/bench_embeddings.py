"""Raw words a second of plain skip-gram (d = 300, window 5, 5 negatives) against gensim 4.4 with ``corpus_file``.

``python -m tests.benchmarks.bench_embeddings --gensim-python PATH --text TEXT`` prints JSON and exits with 1 when the
bound is missed. ``PATH`` is the Python of an environment of its own with gensim 4.4 (``python -m venv E; E/bin/pip
install gensim==4.4.0``): gensim is no dependency of this project. ``TEXT`` is plain text in lower case, one sentence a
line.

A turn is one pass of each side over the whole text, one after the other, each in a process of its own with two threads.
What is compared is what both call words a second: words of the text before rare ones are left out and frequent ones are
thinned, divided by the time of the training alone. The ratio is the median over the turns. Both sides must find the
same number of words in the text and in the vocabulary, else nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DIM, WINDOW, NEGATIVES, SUBSAMPLE, MIN_COUNT, THREADS, BOUND = 300, 5, 5, 1e-4, 5, 2, 0.5
GENSIM_VERSION = "4.4."
GENSIM = """
import json, sys
import gensim
from gensim.models import word2vec
job = json.loads(sys.argv[1])
if word2vec.FAST_VERSION < 0:
    sys.exit("gensim was built without its compiled routines: install a wheel of it")
model = word2vec.Word2Vec(sg=1, hs=0, alpha=0.025, min_alpha=1e-4, epochs=1, **job)
print(json.dumps({"version": gensim.__version__, "words": model.corpus_total_words, "vocabulary": len(model.wv),
                  "seconds": model.total_train_time}))
"""


@dataclass(frozen=True)
class Pass:
    """A pass of a side over the text: raw words, words of the vocabulary, raw words a second."""

    words: int
    vocabulary: int
    speed: float


def gensim_version(python: Path) -> str:
    """The version of gensim that a Python has.

    Raises:
        SystemExit: it has none, or another than `GENSIM_VERSION`.
    """
    remedy = (
        "make an environment for it: python -m venv E; E/bin/pip install gensim==4.4.0; --gensim-python E/bin/python"
    )
    command = [str(python), "-c", "import gensim; print(gensim.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"--gensim-python {python}: cannot be run ({error.strerror}); {remedy}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"--gensim-python {python}: gensim cannot be imported ({last}); {remedy}")
    version = done.stdout.strip()
    if not version.startswith(GENSIM_VERSION):
        raise SystemExit(f"--gensim-python {python}: gensim {version}; the bound is for {GENSIM_VERSION}x: {remedy}")
    return version


def gensim(python: Path, text: Path, threads: int, dim: int) -> Pass:
    """A pass of gensim."""
    job = {
        "corpus_file": str(text), "vector_size": dim, "window": WINDOW, "negative": NEGATIVES, "sample": SUBSAMPLE,
        "min_count": MIN_COUNT, "workers": threads,
    }  # fmt: skip
    found = json.loads(_output([str(python), "-c", GENSIM, json.dumps(job)]).splitlines()[-1])
    return Pass(found["words"], found["vocabulary"], found["words"] / found["seconds"])


def ours(text: Path, cache: Path, threads: int, dim: int) -> Pass:
    """A pass of ``capt pretrain ace/skipgram``; its speed is that of all updates of the run together."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        run = Path(folder) / "run"
        _output([
            sys.executable, "-m", "capt.launcher", "pretrain", "ace/skipgram", "--nproc", "1", f"data.files={text}",
            f"data.cache={cache}", f"data.window={WINDOW}", f"data.subsample={SUBSAMPLE}",
            f"data.min_count={MIN_COUNT}", f"negatives.number={NEGATIVES}", f"model.dim={dim}",
            f"run.threads={threads}", f"run.dir={run}", "schedule.epochs=1", "run.tensorboard=false",
            "checkpoint.every=0",
        ])  # fmt: skip
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        vocabulary = sum(1 for _ in (run / "vocabulary.txt").open(encoding="utf-8"))
    record = json.loads(next((cache / "embeddings").glob("*/corpus.json")).read_text(encoding="utf-8"))
    return Pass(record["raw_words"], vocabulary, speed_of(rows))


def speed_of(rows: list[dict[str, float]]) -> float:
    """Raw words a second over all updates: the mean of ``words_per_second``, weighted by the time of each row."""
    done, words, time = 0.0, 0.0, 0.0
    for row in rows:
        if "words_per_second" in row:
            words += row["tokens"] - done
            time += (row["tokens"] - done) / row["words_per_second"]
            done = row["tokens"]
    return words / time


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ...\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    """Measure both, print JSON, return 1 below the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gensim-python", type=Path, required=True, help="Python of an environment with gensim 4.4")
    parser.add_argument("--text", type=Path, required=True, help="plain text in lower case, a sentence a line")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--dim", type=int, default=DIM)
    options = parser.parse_args()
    if not options.text.is_file():
        parser.error(f"--text {options.text}: there is no such file")
    text, version = options.text.resolve(), gensim_version(options.gensim_python)
    turns: list[tuple[Pass, Pass]] = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.turns):
            pair = (
                ours(text, Path(cache), options.threads, options.dim),
                gensim(options.gensim_python, text, options.threads, options.dim),
            )
            turns.append(pair)
            if len({(side.words, side.vocabulary) for side in pair}) > 1:
                raise SystemExit(
                    f"--text {text}: ours reads {pair[0].words:,} words, {pair[0].vocabulary:,} of them different, and "
                    f"gensim {pair[1].words:,} and {pair[1].vocabulary:,}; give plain text in lower case, not packed"
                )
    ratio = statistics.median(own.speed / other.speed for own, other in turns)
    result = {
        "ours_words_per_second": round(statistics.median(own.speed for own, _ in turns)),
        "gensim_words_per_second": round(statistics.median(other.speed for _, other in turns)),
        "ratio": round(ratio, 2),
        "bound": BOUND,
        "gensim": version,
        "threads": options.threads,
        "words": turns[0][0].words,
        "vocabulary": turns[0][0].vocabulary,
        "dim": options.dim,
        "turns": options.turns,
    }
    print(json.dumps(result))
    return 0 if ratio >= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
