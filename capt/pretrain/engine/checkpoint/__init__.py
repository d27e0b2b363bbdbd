"""A checkpoint format of safetensors fragments and JSON, the same for any world size and ZeRO stage."""

from capt.pretrain.engine.checkpoint.layout import (
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
    load_engine,
    load_module,
    load_module_weights,
    load_module_weights_together,
    read_weights,
)
from capt.pretrain.engine.checkpoint.save import PendingSave, begin_save, read_exports, write_weights_only

__all__ = [
    "PendingSave",
    "begin_save",
    "find_best",
    "find_checkpoint",
    "load_engine",
    "load_module",
    "load_module_weights",
    "load_module_weights_together",
    "open_checkpoint",
    "read_exports",
    "read_job",
    "read_job_of_run",
    "read_manifest",
    "read_metadata",
    "read_weights",
    "verify",
    "verify_together",
    "write_weights_only",
]
