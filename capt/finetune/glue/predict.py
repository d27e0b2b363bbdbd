"""``capt predict`` with a checkpoint of a ``glue`` job."""

from __future__ import annotations

from capt.finetune.text_predictor import command

__all__ = ["command"]
