"""The study behind docs/results/queue.md: does a memory queue help, how long may it be, and which guard does it need?

``CAPT_DATA=... python -m tests.studies.queue ratio --out runs/queue-ratio`` is Figure 3 (left) of the CAPT
paper at the size of a laptop: steps of 8 pairs, queues of 0, 4, 16 and 64 times the rows of a step, each of four
guards, five seeds. ``... queue collapse --out runs/queue-collapse`` uses queues of 256 to 8,192 rows from the
first step of a fast encoder, with both temperatures, and counts the runs that collapse. ``... queue shipped --out
runs/queue-shipped`` is the job ``capt_tiny`` (in bf16, with a shorter warmup), on prose and on docstrings: which guard
is to be its default? ``... queue small --out runs/queue-small`` asks the same of ``capt_small``, with a queue of two
steps as it ships, for 1,000 steps: for a GPU.

All write ``trials.csv`` and ``tables.md``, ``ratio`` also ``trials.png``. Finished runs stay as they are, so the same
command continues after an interruption; more seeds, arms or ratios may be asked for later.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.realdata import real_data
from tests.studies.queue_plot import plot_trials
from tests.studies.queue_tables import trial_of, write_tables
from tests.studies.support import capt, finish, same_settings, together, write_trials

PLAIN = {"drift": "none", "queue_share": "null", "queue_weight": "null"}
ARMS: dict[str, dict[str, str]] = {
    "none": {},  # no queue
    "plain": {},
    "late": {},  # and contrast.queue_start
    "momentum": {"momentum": "0.99"},
    "mean": {"drift": "mean"},
    "moments": {"drift": "moments"},
    "share": {"queue_share": "1"},
    "mean-share": {"drift": "mean", "queue_share": "1"},
    "moments-share": {"drift": "moments", "queue_share": "1"},
    "moments-quarter": {"drift": "moments", "queue_share": "0.25"},
    "separate": {"queue_weight": "0.1"},
    "moments-separate": {"drift": "moments", "queue_weight": "0.1"},
}
"""Guard of the queue -> settings of ``contrast``, beside those of a queue without any."""
TEMPERATURES = {"triangle": [], "constant": ["contrast.temperature={type: constant, value: 0.1}"]}


class Shape(NamedTuple):
    """Runs of a part of the study; a queue without another guard starts after the share ``late`` of the steps."""

    pairs: int
    steps: int
    rate: float
    queues: tuple[int, ...]
    arms: tuple[str, ...]
    temperatures: tuple[str, ...]
    texts: tuple[str, ...] = ("books",)
    late: float = 0.4
    job: str = "capt_tiny"


PARTS = {
    "ratio": Shape(8, 2000, 5e-4, (0, 64, 256, 1024), ("late", "momentum", "moments", "moments-share"), ("triangle",)),
    "collapse": Shape(64, 250, 1e-3, (256, 1024, 2048, 4096, 8192), ("moments-share",), tuple(TEMPERATURES)),
    "shipped": Shape(
        64,
        400,
        1e-3,
        (0, 256),
        ("late", "mean", "moments-share", "moments-quarter", "moments-separate"),
        ("triangle",),
        ("books", "docstrings"),
        late=0.25,
    ),
    "small": Shape(128, 1000, 5e-4, (0, 512), ("plain", "moments-share"), ("triangle",), job="capt_small"),
}


class Key(NamedTuple):
    """A run. A queue of 0 rows has no guard: its arm is ``none``."""

    text: str
    arm: str
    temperature: str
    queue: int
    seed: int

    @property
    def folder(self) -> str:
        """Its name."""
        return f"{self.text}-{self.arm}-{self.temperature}-{self.queue}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and what is run. ``extra`` are overrides of every run."""

    out: Path
    data: Path
    shape: Shape
    steps: int
    extra: list[str]

    def run(self, key: Key) -> Path:
        """The folder of a run."""
        return self.out / key.folder

    def text(self, name: str) -> list[str]:
        """The overrides that name a text: books, or the docstrings of the installed packages."""
        if name == "docstrings":
            return []
        corpus = self.data / "corpus"
        return [
            f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
            f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        ]


def train_and_measure(study: Study, key: Key) -> None:
    """Train, and measure sentence similarity without fine-tuning."""
    shape, folder = study.shape, study.run(key)
    start = round(shape.late * study.steps) if key.arm == "late" else 0
    guard = [f"contrast.{name}={value}" for name, value in {**PLAIN, **ARMS[key.arm]}.items()]
    finish(
        folder, "pretrain", shape.job, "run.threads=1", "run.log_every=20", "run.tensorboard=false",
        f"run.seed={key.seed}", *study.text(key.text), "engine.precision=bf16",
        f"batch.global={shape.pairs}", f"batch.micro={shape.pairs}", f"optimizer.lr={shape.rate:g}",
        f"schedule.max_steps={study.steps}", f"schedule.warmup_steps={round(0.05 * study.steps)}",
        "validate.every=" + str(max(1, study.steps // 5)), "checkpoint.every=0", "checkpoint.keep=1",
        f"contrast.queue={key.queue}", f"contrast.queue_start={start}", *guard,
        *TEMPERATURES[key.temperature], *study.extra,
    )  # fmt: skip
    if not (folder / "sts.json").exists():
        part = folder / "sts.json.part"
        capt("evaluate", folder, "--sts", study.data / "glue" / "STS-B", "--out", part)
        part.rename(folder / "sts.json")


def keys_of(options: argparse.Namespace) -> Iterator[Key]:
    """The runs that are asked for, seed after seed."""
    for seed in range(options.first_seed, options.seeds + 1):
        for text in options.texts:
            for temperature in options.temperatures:
                for queue in options.queues:
                    for arm in options.arms if queue else ["none"]:
                        yield Key(text, arm, temperature, queue, seed)


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--texts", nargs="*", choices=["books", "docstrings"])
    parser.add_argument("--arms", nargs="*", choices=[arm for arm in ARMS if arm != "none"], help="guards of the queue")
    parser.add_argument("--queues", nargs="*", type=int, help="rows; 0 = no queue")
    parser.add_argument("--temperatures", nargs="*", choices=list(TEMPERATURES))
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--steps", type=int, help="of every run")
    parser.add_argument("--extra", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_args()
    data = real_data(parser, "corpus", "glue")
    shape = PARTS[options.part]
    for name in ("queues", "arms", "temperatures", "texts"):
        if getattr(options, name) is None:
            setattr(options, name, list(getattr(shape, name)))
    study = Study(options.out.resolve(), data, shape, options.steps or shape.steps, options.extra)
    same_settings(study.out, {"part": options.part, "steps": study.steps, "extra": study.extra})
    keys = list(keys_of(options))

    def job(key: Key) -> Callable[[], None]:
        return lambda: train_and_measure(study, key)

    together(map(job, keys), options.parallel)
    trials = [trial_of(study.run(key), key, 2 * shape.pairs) for key in keys]
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, study.out / "tables.md")
    if len(options.queues) > 1 and len(options.texts) == len(options.temperatures) == 1:
        plot_trials(trials, study.out / "trials.png")
    capt("report", *(study.run(key) for key in keys), "--out", study.out / "report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
