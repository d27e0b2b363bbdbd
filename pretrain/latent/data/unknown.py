"""The share of unknown words in a text, and a warning where a model cannot know how probable they are."""

from __future__ import annotations

import logging

from pretrain.latent.data.corpus import Sentences

logger = logging.getLogger(__name__)


def report_unknown(sentences: Sentences, what: str, unknown: int, in_training: int | None) -> None:
    """Log the share of unknown words among the scored tokens of a held-out text.

    Args:
        sentences: the text.
        what: its name in the log.
        unknown: the number of the unknown word.
        in_training: how often the training text has it; None where that is not known.
    """
    count = sentences.count(unknown)
    share = count / sentences.scored
    logger.info("%s: %.2f%% of %d scored tokens are unknown words", what, 100 * share, sentences.scored)
    if count and in_training == 0:
        logger.warning(
            "%s: %.2f%% of the scored tokens are unknown words, and the training text has none, so the probability "
            "that they get means nothing: read ppl_known, or train with data.min_count=2", what, 100 * share,
        )  # fmt: skip
