"""How much room a job's checkpoints need: from those that it has, else estimated from its configuration."""

from __future__ import annotations

from capt.pretrain.config.schema import Job


def needed(job: Job) -> tuple[int | None, int]:
    """Bytes of one checkpoint (None where nothing tells), and how many more there will be at the same time.

    ``checkpoint.keep`` stay while the next one is written, and the best one may be a further one. Those that a resumed
    run has already are not counted again, but there is always one more to write.
    """
    have = sorted(path.parent for path in (job.run.dir / "checkpoints").glob("step-*/manifest.json"))
    copies = job.checkpoint.keep + 1 + (job.checkpoint.best is not None) - len(have)
    one = sum(file.stat().st_size for file in have[-1].rglob("*") if file.is_file()) if have else job.checkpoint_bytes()
    return one, max(1, copies)
