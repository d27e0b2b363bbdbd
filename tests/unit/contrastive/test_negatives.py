"""A job whose contrast compares a sample with nothing is refused, whatever its batch is made of."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.data.sampler import micro_batches
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.vision_language.task import VisionLanguageTask
from tests.language import language_mapping
from tests.vision_language import vision_language_mapping


@pytest.mark.parametrize(
    ("task", "mapping"),
    [
        (LanguageTask, language_mapping),
        pytest.param(VisionLanguageTask, vision_language_mapping, marks=pytest.mark.family),
    ],
)
def test_a_contrast_of_one_sample_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type[ContrastTask], mapping: object
) -> None:
    """Against what each rank's micro-batches hold; a queue gives negatives from the second step on."""
    refused = 0
    for world, batch, micro, cached, in_batch, queue in itertools.product(
        (1, 2), (1, 2, 4), (1, 2), (True, False), ("global", "local"), (0, 41)
    ):
        monkeypatch.setattr(distributed, "world_size", lambda group=None, world=world: world)
        if batch < world or batch % (micro * world):
            continue
        changes = {"cached": cached, "in_batch": in_batch, "queue": queue}
        job = job_from_mapping(mapping(tmp_path, contrast=changes, batch={"global": batch, "micro": micro}), "test")  # type: ignore[operator]
        one = object.__new__(task)
        ContrastTask.__init__(one, job)
        monkeypatch.setattr(task, "samples", 9)
        parts = batch // (micro * world)
        shares = [micro_batches(0, batch, 1 if cached else parts, world, rank) for rank in range(world)]
        compared = [sum(map(len, each)) for each in zip(*shares, strict=True)]
        if in_batch == "local":
            compared = [len(part) for share in shares for part in share]
        if max(compared) > 1 or queue:
            one.require_negatives()
        else:
            with pytest.raises(ConfigError, match="has no negative, so that its contrast is 0"):
                one.require_negatives()
            refused += 1
    assert refused > 5
    monkeypatch.setattr(task, "samples", 1)
    with pytest.raises(DataError, match="holds one sample, which has no negative"):
        one.require_negatives()
