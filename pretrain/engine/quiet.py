"""Keeps other libraries' chatter out of the log, unless debugging."""

from __future__ import annotations

import logging
import os
import warnings

import torch


def quiet_libraries(*, debug: bool) -> None:
    """DeepSpeed's INFO lines and torch's deprecation notes about DeepSpeed's own calls; must run before importing it."""
    if debug:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    for module in (r"torch\.distributed", r"deepspeed"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
