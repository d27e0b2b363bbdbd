"""The names of what validation of pairs reports. No torch."""

from __future__ import annotations

from capt.pretrain.engine.judgement import error_of

RECALLS = ("recall/to_document", "recall/to_query")
RETRIEVAL = (*RECALLS, "mrr/to_document", "mrr/to_query")
"""Metrics of retrieval in validation, also at each width of ``contrast.matryoshka``."""
METRICS = ("loss/pairs", *RETRIEVAL, *map(error_of, RECALLS), "validation_samples")
"""Metrics of validation beside the figures of scored pairs (`PairLoss.figures`)."""
SPREAD = ("alignment", "uniformity", "first_direction")
"""Metrics of vectors beside them."""


TAUGHT = ("teacher/cosine", "teacher/cosine_p5", "teacher/reached")
"""Metrics of what a teacher's vectors train: the cosine to them, in the mean and its 5th percentile, and the share that
is reached of the teacher's own figure of retrieval."""


def of_teacher(metric: str) -> str:
    """The name of the teacher's own figure beside ``metric``."""
    return f"teacher/{metric}"


def at_width(metric: str, width: int) -> str:
    """The name of a metric of vectors that are cut to ``width`` columns."""
    return f"{metric}/{width}"
