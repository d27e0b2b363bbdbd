"""Files that measurements of a run are kept in, inside its run folder, where reports find them."""

from __future__ import annotations

EVALUATION = "evaluation-{split}.json"
"""The result of ``capt evaluate`` on a split."""

GENERATED_TEXT = "generated.json"
"""The perplexities of generated text, by ``capt latent perplexity``."""

CODES = "codes"
"""The folder of a clusters run with the codes of each validation, ``step-00005000.npy`` of shape (K, 500, 2)."""
