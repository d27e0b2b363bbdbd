"""Training on a set ten times the cache of a host against the same set on its disk, and preparation by two workers.

``python -m tests.benchmarks.bench_data`` generates JSON lines (documents of about 4.8 KB), and trains a BPE tokenizer
of 8,192 pieces on them.

``prepare``: ``capt data prepare --out`` with one worker and with two, as commands of their own, in turns; a worker has
one thread. The shards of all turns must be equal, byte for byte. 500 MB, the default, is the size to measure: at few
of them the start of the processes counts.

``bucket``: CAPT-tiny's job on one thread, on 40 shards in an S3 server on the loopback (moto), of which the cache has
room for a tenth, and on a disk, with the same order (``data.shards_at_once=2``). Both sides are processes that take
turns of some steps and make their batches themselves; the server's work is in the time of the bucket's side where there
is no further core for it.

Prints one JSON object, and exits with 1 when two workers are not faster than one, or the bucket takes over 5% longer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.paired import answer, in_turns
from tests.unit.data.s3 import put_tree, s3_bucket

MOST_LONGER = 1.05
SHARDS, AT_ONCE, ROOM = 40, 2, 10
LENGTH, BATCH = 128, 32
_CHARACTERS, _WORDS = 4800, 30_000


def write_text(path: Path, megabytes: float) -> None:
    """Documents of words that a Zipf law draws."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(generator.choice(letters[:20], 1 + i % 9)) for i in range(_WORDS)]
    left = int(megabytes * 1e6)
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            drawn = np.minimum(generator.zipf(1.2, _CHARACTERS // 5), _WORDS) - 1
            line = json.dumps({"text": " ".join(words[i] for i in drawn.tolist())}) + "\n"
            file.write(line)
            left -= len(line)


def command(out: Path, workers: int, given: list[str], folder: Path) -> float:
    """Seconds of ``capt data prepare``; raises ``CalledProcessError``."""
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    words = ["data", "prepare", "capt_tiny", *given, "--out", str(out), "--workers", str(workers)]
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "capt.launcher", *words], env=environment, check=True, stdout=sys.stderr)
    return time.perf_counter() - begin


def digests(out: Path) -> dict[str, str]:
    """The hashes of the files of shard sets."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.glob("*/*"))
        if path.is_file()
    }


def preparation(folder: Path, given: list[str], turns: int) -> dict[str, Any]:
    """The row of ``prepare``."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    made = []
    for turn in range(turns):
        for workers in (1, 2) if turn % 2 == 0 else (2, 1):
            out = folder / f"out-{turn}-{workers}"
            seconds[workers].append(command(out, workers, given, folder))
            made.append(digests(out))
    assert made[0], "nothing was written"
    assert all(each == made[0] for each in made), "the shards differ"
    megabytes = (folder / "text.jsonl").stat().st_size / 1e6
    ratio = statistics.median(one / two for one, two in zip(seconds[1], seconds[2], strict=True))
    return {
        "what": "prepare", "MB": round(megabytes), "turns": turns,
        "MB/s, 1 worker": megabytes / statistics.median(seconds[1]),
        "MB/s, 2 workers": megabytes / statistics.median(seconds[2]), "2 workers as fast": ratio, "ok": ratio > 1,
    }  # fmt: skip


def side(pipe: Connection, steps: int, folder: Path, keys: dict[str, list[str]], *, name: str) -> None:
    """Steps of the job with the keys of a side each time the parent asks."""
    import torch

    from capt.pretrain.base import distributed
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.rank import keep_freed_memory, seed_step
    from capt.pretrain.engine.task import Progress
    from capt.pretrain.language.task import LanguageTask

    torch.set_num_threads(1)
    keep_freed_memory()
    quiet_libraries(debug=False)
    distributed.initialize(timeout_minutes=10)
    task = LanguageTask(load_job("capt_tiny", keys[name]), folder / f"run-{name}")
    engines, progress = build_engines(task.build_modules(), task.job, task.optimizers()), Progress()
    batches = task.build_batches(progress)

    def turn(number: int) -> None:
        for _ in range(steps):
            seed_step(1, progress.step)
            task.step(engines, next(batches), progress)
            progress.step += 1

    answer(pipe, turn)


def training(folder: Path, given: list[str], steps: int, turns: int) -> dict[str, Any]:
    """The row of ``bucket``."""
    from capt.pretrain.config.load import load_job
    from capt.pretrain.data.prepare import open_corpus, verifier_of
    from capt.pretrain.data.shard_writer import write_shards
    from capt.tokenizer.encode import load_tokenizer

    job: Any = load_job("capt_tiny", [*given, f"data.cache={folder / 'made'}", "data.validation_fraction=0"])
    corpus = open_corpus(job.data, "train")
    assert corpus is not None
    tokenizer = load_tokenizer(job.tokenizer.path)
    write = partial(write_shards, corpus, tokenizer, key="k", options={}, workers=1, verifier=verifier_of(job.data))
    tokens = write(folder / "whole").tokens
    write(folder / "set/train", shard_tokens=-(-tokens // SHARDS))
    files = [path.stat().st_size for path in (folder / "set/train").glob("shard-*.bin")]
    room = sum(files) // ROOM + (folder / "set/train/documents.bin").stat().st_size
    keys = [
        *given[1:], f"data.sequence_length={LENGTH}", f"batch.global={BATCH}", f"batch.micro={BATCH}",
        f"data.shards_at_once={AT_ONCE}", "schedule.max_steps=100000", "run.threads=1", "loader.workers=0",
    ]  # fmt: skip
    with s3_bucket() as url:
        put_tree(folder / "set", f"{url}/set")
        of_sides = {
            "disk": [*keys, f"data.shards={folder / 'set'}", f"data.cache={folder / 'cache-disk'}"],
            "bucket": [*keys, f"data.shards={url}/set", f"data.cache={folder / 'cache'}", f"data.cache_bytes={room}"],
        }
        bucket, disk = partial(side, name="bucket"), partial(side, name="disk")
        timings = in_turns(bucket, disk, (steps, folder, of_sides), turns, warmup=1)
        kept = sum(path.stat().st_size for path in (folder / "cache/stored").glob("*.bin"))
    assert kept <= room, f"the cache has {kept:,} bytes, of {room:,}"
    windows = (turns + 1) * steps * BATCH
    longer = 1 / timings.ratio
    return {
        "what": "bucket", "bytes of the set": sum(files), "bytes of the cache": room, "shards": len(files),
        "passes over the set": windows * LENGTH / tokens, "turns": turns, "steps of a turn": steps,
        "seconds of a step, disk": statistics.median(timings.other) / steps,
        "seconds of a step, bucket": statistics.median(timings.ours) / steps,
        "bucket, times as long": longer, "ok": longer <= MOST_LONGER,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["prepare", "bucket"])
    parser.add_argument("--megabytes", type=float, default=500.0, help="of text to prepare")
    parser.add_argument("--turns", type=int, default=3, help="of prepare")
    parser.add_argument("--bucket-megabytes", type=float, default=12.0, help="of text to train on")
    parser.add_argument("--bucket-turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50, help="of a turn of bucket")
    arguments = parser.parse_args()
    rows = []
    for what, megabytes in (("prepare", arguments.megabytes), ("bucket", arguments.bucket_megabytes)):
        if arguments.only in (None, what):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                write_text(folder / "text.jsonl", megabytes)
                write_text(folder / "sample.jsonl", min(megabytes, 4.0))
                train = ["tokenizer", "train", str(folder / "sample.jsonl"), "--out", str(folder / "tok")]
                train += ["--vocab-size", "8192", "--type", "bpe"]
                subprocess.run([sys.executable, "-m", "capt.launcher", *train], check=True, stdout=sys.stderr)
                given = [f"data.files={folder / 'text.jsonl'}", f"tokenizer.path={folder / 'tok'}"]
                if what == "prepare":
                    rows.append(preparation(folder, given, arguments.turns))
                else:
                    rows.append(training(folder, given, arguments.steps, arguments.bucket_turns))
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
