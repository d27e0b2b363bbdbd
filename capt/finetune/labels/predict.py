"""``capt predict`` with a checkpoint of a ``labels`` job, or a folder with a classifier of transformers."""

from __future__ import annotations

from capt.finetune.text_predictor import command, load_text_classifier

__all__ = ["command", "load_text_classifier"]
