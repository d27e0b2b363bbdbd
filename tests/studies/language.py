"""The study behind docs/results/language.md: CAPT against MLM alone at equal tokens and equal compute, five seeds each.

``CAPT_DATA=... python -m tests.studies.language --out runs/language-study`` trains every variant on books,
measures held-out books, WikiText-2 and STS-B, and writes ``trials.csv``, ``tables.md``, ``trials.png`` and a report.
Finished runs stay as they are, so the same command continues after an interruption; more seeds may be asked for later.

``mlm-equal-compute`` takes as long as ``capt-queue``: its steps are multiplied by the ratio of the seconds a step,
measured where both ran side by side. ``none`` has random weights: its run takes one step at a rate of 1e-12, which
moves no weight by more than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from tests.realdata import real_data
from tests.studies.language_plot import plot_trials
from tests.studies.language_tables import trial_of, write_tables
from tests.studies.support import capt, finish, same_settings, steps_of_equal_compute, together, write_trials

PLAIN = ["contrast.drift=none", "contrast.queue_share=null"]
"""The queue of the paper: neither guard of ``capt_tiny``."""
MLM = ["contrast.weight=0", "contrast.queue=0", *PLAIN]
REFERENCE = "capt-queue"
STEPS = 250


def variants(steps: int) -> dict[str, list[str]]:
    """The overrides of every variant. A queue that starts late serves after two fifths of the steps."""
    none = ["contrast.queue=0", *PLAIN]
    late = ["contrast.queue=256", f"contrast.queue_start={2 * steps // 5}", *PLAIN]
    at_once = ["contrast.queue=256", "contrast.queue_start=0", *PLAIN]
    constant = "contrast.temperature={type: constant, value: 0.1}"
    return {
        REFERENCE: late,
        "mlm": MLM,  # beside the reference: the runs of the first seed measure the compute
        "capt-no-queue": none,
        "capt-no-queue-constant": [*none, constant],
        "capt-queue-constant": [*late, constant],
        "capt-queue-at-once": at_once,
        "capt-queue-at-once-constant": [*at_once, constant],
        "none": [*MLM, "optimizer.lr=1e-12"],
        "mlm-equal-compute": MLM,
    }


VARIANTS = tuple(variants(STEPS))


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and what is run. ``overrides`` are of every run."""

    out: Path
    data: Path
    steps: int
    overrides: list[str]

    def run(self, variant: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / f"{variant}-seed{seed}"


def train_and_measure(study: Study, variant: str, seed: int, steps: int) -> None:
    """Train a variant with a seed, and measure it on WikiText-2 and STS-B."""
    folder, corpus = study.run(variant, seed), study.data / "corpus"
    warmup = 0 if variant == "none" else round(0.12 * steps)
    finish(
        folder, "pretrain", "capt_tiny", "run.threads=1", "run.log_every=10", "run.tensorboard=false",
        f"run.seed={seed}", f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        "data.sequence_length=64", "tokenizer.vocab_size=4096", "engine.precision=bf16", "model.pooling=mean",
        "batch.global=64", "batch.micro=64", f"schedule.max_steps={steps}", f"schedule.warmup_steps={warmup}",
        "optimizer.lr=1e-3", "optimizer.clip=0", "contrast.weight=1",
        "validate.every=50", "validate.samples=512", "checkpoint.every=0", "checkpoint.keep=1",
        *variants(study.steps)[variant], *study.overrides,
    )  # fmt: skip
    if not (folder / "evaluation.json").exists():
        text, part = study.data / "lm/wikitext-2/wiki.valid.tokens", folder / "evaluation.json.part"
        capt("evaluate", folder, "--text", text, "--sts", study.data / "glue/STS-B", "--out", part)
        part.rename(folder / "evaluation.json")


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every variant of equal tokens")
    parser.add_argument("overrides", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_intermixed_args()
    data = real_data(parser, "corpus", "glue", "lm")
    chosen = [variant for variant in VARIANTS if variant in options.variants]
    if "mlm-equal-compute" in chosen and not {REFERENCE, "mlm"} <= set(chosen):
        parser.error(f"--variants: mlm-equal-compute is measured by {REFERENCE} and mlm; name them too")
    study = Study(options.out.resolve(), data, options.steps, options.overrides)
    same_settings(study.out, {"steps": study.steps, "overrides": study.overrides})
    seeds = range(options.first_seed, options.seeds + 1)

    def job(variant: str, seed: int, steps: int) -> Callable[[], None]:
        return lambda: train_and_measure(study, variant, seed, steps)

    steps = {variant: 1 if variant == "none" else study.steps for variant in chosen if variant != "mlm-equal-compute"}
    together((job(variant, seed, steps[variant]) for seed in seeds for variant in steps), options.parallel)
    if "mlm-equal-compute" in chosen:
        beside = {variant: study.run(variant, options.first_seed) for variant in (REFERENCE, "mlm")}
        longer = steps_of_equal_compute(study.out / "compute.json", study.steps, beside)
        together((job("mlm-equal-compute", seed, longer) for seed in seeds), options.parallel)
    trials = [trial_of(study.run(variant, seed), variant, seed) for variant in chosen for seed in seeds]
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, study.out / "tables.md")
    plot_trials(trials, study.out / "trials.png")
    capt("report", *(study.run(v, seed) for v in chosen for seed in seeds), "--out", study.out / "report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
