"""The study behind docs/results/language.md: CAPT against MLM alone at equal tokens, three seeds each.

``CAPT_DATA=... python -m tests.benchmarks.study_language --out runs/study`` trains every variant on the books corpus,
one after the other on this host, resumes what was interrupted, and writes one report over all runs. Then evaluate with
``--evaluate``: WikiText-2 and STS-B for the last checkpoint of each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

VARIANTS: dict[str, list[str]] = {
    "mlm": ["contrast.weight=0", "contrast.queue=0"],
    "capt-no-queue": ["contrast.queue=0"],
    "capt-queue": ["contrast.queue=8192"],
    "capt-queue-constant": ["contrast.queue=8192", "contrast.temperature={type: constant, value: 0.1}"],
}


def command(data: Path, out: Path, variant: str, seed: int, extra: list[str]) -> list[str]:
    """The command line of one run."""
    corpus = data / "corpus"
    return [
        "pretrain", "capt_tiny", "--nproc", "2",
        f"run.dir={out / f'{variant}-seed{seed}'}", f"run.seed={seed}", "run.log_every=25",
        f"data.files=[{','.join(str(path) for path in sorted(corpus.glob('books.train.*')))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        "data.sequence_length=64", "tokenizer.vocab_size=8192", "engine.precision=bf16",
        "batch.global=64", "batch.micro=32", "schedule.max_steps=500", "schedule.warmup_steps=50",
        "optimizer.lr=2e-3", "validate.every=125", "validate.samples=512", "checkpoint.every=500", "checkpoint.keep=1",
        *VARIANTS[variant], *extra,
    ]  # fmt: skip


def main() -> int:
    """Train, evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--evaluate", action="store_true", help="evaluate finished runs on WikiText-2 and STS-B")
    parser.add_argument("overrides", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_intermixed_args()
    if "CAPT_DATA" not in os.environ:
        parser.error("CAPT_DATA must name the folder with corpus/, lm/ and glue/")
    data = Path(os.environ["CAPT_DATA"])
    capt = [sys.executable, "-m", "launcher.cli"]
    runs = [(variant, seed) for seed in range(1, options.seeds + 1) for variant in options.variants]
    for variant, seed in runs:
        folder = options.out / f"{variant}-seed{seed}"
        status = folder / "status.json"
        state = json.loads(status.read_text())["state"] if status.exists() else "new"
        if state == "new":
            subprocess.run([*capt, *command(data, options.out, variant, seed, options.overrides)], check=True)
        elif state != "done":
            subprocess.run([*capt, "resume", str(folder)], check=True)
        if options.evaluate and not (folder / "evaluation.json").exists():
            subprocess.run(
                [*capt, "evaluate", str(folder), "--text", str(data / "lm/wikitext-2/wiki.valid.tokens"),
                 "--sts", str(data / "glue/STS-B"), "--out", str(folder / "evaluation.json")],
                check=True,
            )  # fmt: skip
    folders = [str(options.out / f"{variant}-seed{seed}") for variant, seed in runs]
    subprocess.run([*capt, "report", *folders, "--out", str(options.out / "report")], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
