"""Keeps other libraries' chatter out of the log, unless debugging."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def quiet_libraries(*, debug: bool) -> None:
    """Silence torch's notes about its deprecated calls, and DeepSpeed's; call before importing that."""
    if debug:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    for module in (r"torch\.distributed", r"deepspeed"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # what nested tensors ask it, it finds odd


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its progress bars, and its warnings on texts that are long on purpose."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
