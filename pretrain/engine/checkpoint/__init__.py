"""One checkpoint format: safetensors fragments and JSON, the same for any world size and ZeRO stage."""

from capt.pretrain.engine.checkpoint.layout import (
    checkpoints_of,
    find_best,
    find_checkpoint,
    open_checkpoint,
    read_job,
    read_job_of_run,
    read_manifest,
    read_metadata,
    verify,
    verify_together,
)
from capt.pretrain.engine.checkpoint.load import (
    read_weights,
    restore_engine,
    restore_weights,
    restore_weights_together,
    restored,
)
from capt.pretrain.engine.checkpoint.save import PendingSave, begin_save, read_exports, write_weights_only

__all__ = [
    "PendingSave",
    "begin_save",
    "checkpoints_of",
    "find_best",
    "find_checkpoint",
    "open_checkpoint",
    "read_exports",
    "read_job",
    "read_job_of_run",
    "read_manifest",
    "read_metadata",
    "read_weights",
    "restore_engine",
    "restore_weights",
    "restore_weights_together",
    "restored",
    "verify",
    "verify_together",
    "write_weights_only",
]
