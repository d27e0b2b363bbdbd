"""The study behind docs/results/language.md: CAPT against MLM alone at equal tokens, three seeds each.

``CAPT_DATA=... python -m tests.benchmarks.study_language --out runs/study`` trains every variant on the books corpus,
as many at a time as there are cores, resumes what was interrupted, and writes one report over all runs. ``--evaluate``
adds WikiText-2 and STS-B for the last checkpoint of each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONSTANT = "contrast.temperature={type: constant, value: 0.1}"
QUEUE = ["contrast.queue=256", "contrast.queue_start=100"]
VARIANTS: dict[str, list[str]] = {
    "mlm": ["contrast.weight=0", "contrast.queue=0"],
    "capt-no-queue": ["contrast.queue=0"],
    "capt-no-queue-constant": ["contrast.queue=0", CONSTANT],
    "capt-queue": QUEUE,
    "capt-queue-constant": [*QUEUE, CONSTANT],
    "capt-queue-at-once": ["contrast.queue=256", "contrast.queue_start=0"],
    "capt-queue-at-once-constant": ["contrast.queue=256", "contrast.queue_start=0", CONSTANT],
}


def command(data: Path, out: Path, variant: str, seed: int, extra: list[str]) -> list[str]:
    """The command line of one run: one process on one core, so that as many run at a time as there are cores."""
    corpus = data / "corpus"
    return [
        "pretrain", "capt_tiny", "--nproc", "1", "run.threads=1",
        f"run.dir={out / f'{variant}-seed{seed}'}", f"run.seed={seed}", "run.log_every=10", "run.tensorboard=false",
        f"data.files=[{','.join(str(path) for path in sorted(corpus.glob('books.train.*')))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        "data.sequence_length=64", "tokenizer.vocab_size=4096", "engine.precision=bf16", "model.pooling=mean",
        "batch.global=64", "batch.micro=64", "schedule.max_steps=250", "schedule.warmup_steps=30",
        "optimizer.lr=1e-3", "optimizer.clip=0", "contrast.weight=1",
        "validate.every=50", "validate.samples=512", "checkpoint.every=0", "checkpoint.keep=1",
        *VARIANTS[variant], *extra,
    ]  # fmt: skip


def one(capt: list[str], data: Path, options: argparse.Namespace, variant: str, seed: int) -> None:
    """Train a run, or resume it, or leave it as it is when it is done; then evaluate it if asked to."""
    folder = options.out / f"{variant}-seed{seed}"
    status = folder / "status.json"
    state = json.loads(status.read_text())["state"] if status.exists() else "new"
    if state == "new":
        subprocess.run([*capt, *command(data, options.out, variant, seed, options.overrides)], check=True)
    elif state != "done":
        subprocess.run([*capt, "resume", str(folder)], check=True)
    if options.evaluate and not (folder / "evaluation.json").exists():
        text, sts = data / "lm/wikitext-2/wiki.valid.tokens", data / "glue/STS-B"
        arguments = ["--text", str(text), "--sts", str(sts), "--out", str(folder / "evaluation.json")]
        subprocess.run([*capt, "evaluate", str(folder), *arguments], check=True)


def main() -> int:
    """Train, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--evaluate", action="store_true", help="evaluate finished runs on WikiText-2 and STS-B")
    parser.add_argument("overrides", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_intermixed_args()
    if "CAPT_DATA" not in os.environ:
        parser.error("CAPT_DATA must name the folder with corpus/, lm/ and glue/")
    data = Path(os.environ["CAPT_DATA"])
    capt = [sys.executable, "-m", "launcher.cli"]
    runs = [(variant, seed) for seed in range(1, options.seeds + 1) for variant in options.variants]
    with ThreadPoolExecutor(options.parallel) as pool:
        for done in [pool.submit(one, capt, data, options, *run) for run in runs]:
            done.result()
    folders = [str(options.out / f"{variant}-seed{seed}") for variant, seed in runs]
    subprocess.run([*capt, "report", *folders, "--out", str(options.out / "report")], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
