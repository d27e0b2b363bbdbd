"""What a run has made at its first start and continues with, whatever becomes of the data and of the cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pretrain.base.verification import ALONE, Ranks
from pretrain.config.schema import Job


def kept_in_run(run_dir: Path, name: str, applies: Callable[[Job], bool], ranks: Ranks = ALONE) -> Path | None:
    """The file or folder ``name`` of the newest checkpoint, copied into the run, since checkpoints are pruned.

    None where the run has no checkpoint, its checkpoint holds no ``name``, or its job says that this is no longer what
    is wanted. All ``ranks`` call this.

    Args:
        run_dir: the run.
        name: as the task's ``export_files`` has it.
        applies: whether what the job of the checkpoint has made is what the job of now would make.
        ranks: those that run the job.
    """
    from pretrain.engine.checkpoint import checkpoints_of, read_job  # DeepSpeed, which preparing alone does without

    with ranks.synchronize_errors():
        newest = [None, *checkpoints_of(run_dir)][-1]
        if newest is None or not applies(read_job(newest)) or not (newest / name).exists():
            return None
        kept = run_dir / name
        if ranks.rank == 0:  # anew at each start: the copy may have lost bits, or a power cut its content
            partial = run_dir / f".{name}"
            if (newest / name).is_dir():
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(newest / name, partial, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(newest / name, partial)
            if kept.is_dir() and not kept.is_symlink():
                shutil.rmtree(kept)
            partial.replace(kept)
    return kept
