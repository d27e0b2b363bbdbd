"""Keeps other libraries' chatter out of the log, unless debugging."""

from __future__ import annotations

import logging
import os
import warnings

import torch


def quiet_libraries(*, debug: bool) -> None:
    """Silence DeepSpeed's INFO lines and torch's notes about its deprecated calls; call before importing it."""
    if debug:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    for module in (r"torch\.distributed", r"deepspeed"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # what nested tensors ask it, it finds odd
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
