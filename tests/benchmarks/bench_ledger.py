"""Cost of the ledger in a step, and how fast a long one is checked.

``python -m tests.benchmarks.bench_ledger`` trains capt_tiny for a few steps on one rank of one thread and measures the
processor time of the ledger's hook beside that of the whole step; then it writes and checks the ledger of a long run
that never was. It prints one JSON object and exits with 1 when the bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.run import run_job
from capt.pretrain.reliability.ledger.check import check
from capt.pretrain.reliability.ledger.files import ROW
from capt.pretrain.reliability.sample_ledger import SampleLedger
from tests.language import write_corpus
from tests.support import run_ranks
from tests.unit.reliability.ledger.histories import ORDER, edit, file_of, launch

MOST_SHARE = 0.005
WORLD = 4


def rank(folder: str, steps: int) -> tuple[float, float]:
    """Processor seconds, in the median, of a step of capt_tiny and of the ledger in it."""
    quiet_libraries(debug=False)
    keys = {
        "data.files": f"{folder}/text.txt", "data.cache": f"{folder}/cache", "run.dir": f"{folder}/run",
        "run.threads": 1, "run.tensorboard": "false", "checkpoint.every": 0, "validate.every": 0,
        "data.workers": 1, "loader.workers": 0,
        "tokenizer.vocab_size": 400, "schedule.max_steps": steps, "schedule.warmup_steps": 1, "contrast.queue_start": 0,
    }  # fmt: skip
    spent: list[float] = []
    ends: list[float] = []
    hook = SampleLedger.after_step

    def timed(self: SampleLedger, run: Any, report: Any) -> None:
        begin = time.process_time()
        hook(self, run, report)
        ends.append(time.process_time())
        spent.append(ends[-1] - begin)

    SampleLedger.after_step = timed  # type: ignore[method-assign]
    run_job(load_job("capt_tiny", [f"{key}={value}" for key, value in keys.items()]))
    apart = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(apart), statistics.median(spent[1:])


def cost(steps: int) -> dict[str, Any]:
    """The ledger's share of a step."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "text.txt", documents=800)
        ((step, ledger),) = run_ranks(rank, 1, folder, steps, timeout=600.0)
    return {
        "name": "capt_tiny: the ledger's share of a step (one rank)",
        "value": round(ledger / step, 5),
        "bound": MOST_SHARE,
        "ok": ledger <= MOST_SHARE * step,
        "CPU ms of a step": round(1e3 * step, 1),
        "CPU ms of the ledger": round(1e3 * ledger, 3),
    }


def speed(steps: int) -> dict[str, Any]:
    """Seconds to check a run of four ranks with twelve samples a step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        launch(run, WORLD, 0, [steps] * WORLD, order=ORDER.model_copy(update={"samples": 1_000_003}))
        begin = time.process_time()
        assert not check(run).faults
        seconds = time.process_time() - begin
        size = file_of(run, 1, 0).stat().st_size
        edit(file_of(run, 1, 3), lambda rows: rows[:-1])
        assert check(run).recorded_to == steps - 1
    return {
        "name": "check of a run, CPU seconds",
        "value": round(seconds, 2),
        "bound": None,
        "ok": True,
        "steps": steps,
        "ranks": WORLD,
        "bytes a step and rank": round(size / steps, 2),
        "of them a row": ROW.itemsize,
    }


def main() -> int:
    """Measure, print, and say whether the bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checked", type=int, default=20_000)
    arguments = parser.parse_args()
    rows = [cost(arguments.steps), speed(arguments.checked)]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
