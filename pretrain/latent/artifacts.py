"""What is measured of a run and kept in its folder, where reports find it."""

from __future__ import annotations

EVALUATION = "evaluation-{split}.json"
"""Of ``capt evaluate``."""

GENERATED_TEXT = "generated.json"
"""Of ``capt latent perplexity``."""

CODES = "codes"
"""Folder of a run of clusters with the codes of each validation, ``step-00005000.npy`` of shape (K, 500, 2)."""
