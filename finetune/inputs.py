"""A look at what every fine-tuning job starts from, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from capt.pretrain.language.inputs import describe_initial_model as describe_initial_model
