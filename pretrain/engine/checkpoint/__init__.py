"""One checkpoint format: safetensors fragments and JSON, the same for any world size and ZeRO stage."""

from pretrain.engine.checkpoint.layout import (
    checkpoints_of,
    find_best,
    find_checkpoint,
    open_checkpoint,
    read_job,
    read_job_of_run,
    verify,
    verify_together,
)
from pretrain.engine.checkpoint.load import (
    read_weights,
    restore_engine,
    restore_weights,
    restore_weights_together,
    restored,
)
from pretrain.engine.checkpoint.manifest import read_manifest, read_metadata
from pretrain.engine.checkpoint.pending import PendingSave
from pretrain.engine.checkpoint.save import begin_save, read_exports, write_weights_only

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
