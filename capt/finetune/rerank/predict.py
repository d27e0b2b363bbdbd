"""``capt predict`` with a checkpoint of a ``rerank`` job: the score of each pair of a table."""

from __future__ import annotations

from capt.finetune.text_predictor import command

__all__ = ["command"]
