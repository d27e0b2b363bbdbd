"""The losses of capt_vl, from the assembler to the total, against transformers' LXMERT: same batch, same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.writer import write_store
from capt.pretrain.vision_language.batches import MaskingVocabulary, VisionLanguageAssembler
from capt.pretrain.vision_language.module import Counts, VisionLanguageModule, divisors, loss_sums
from capt.pretrain.vision_language.prepare import prepare
from tests.families.pictures.parity.test_lxmert_hf import stock
from tests.vision_language import make_pictures, vision_language_mapping

REGIONS = 36


def _store_of_36_regions(folder: Path) -> None:
    def pictures():
        for number, picture in enumerate(make_pictures(40)):
            rng = np.random.default_rng(number)
            pick = rng.integers(0, len(picture.features), REGIONS)
            noise = rng.normal(0, 0.1, (REGIONS, picture.features.shape[1])).astype(np.float32)
            labels = [Labels(x.ids[pick], x.scores[pick]) for x in (picture.objects, picture.attributes)]
            yield Picture(picture.id, 101, 101, picture.features[pick] + noise, picture.boxes[pick], *labels)

    write_store(folder, pictures(), feature_dtype="fp32", features_of={"backend": "test"})


@pytest.mark.parametrize("labelled", [True, False])
def test_total_and_parts(tmp_path: Path, labelled: bool) -> None:
    """36 regions each, fp32, 1e-5 relative. Without any answer transformers gives NaN, and we give 0."""
    mapping = vision_language_mapping(tmp_path, model={"initializer_range": 0.3}, contrast={"weight": 0.0, "queue": 0})
    _store_of_36_regions(tmp_path / "store36")
    mapping["data"]["regions"] = str(tmp_path / "store36")
    prepared = prepare(job_from_mapping(mapping, "test"))
    job = prepared.job
    batch = VisionLanguageAssembler(
        prepared.train, prepared.store, MaskingVocabulary.of(prepared.tokenizer), job.objectives, job.contrast,
        length=job.data.sequence_length, seed=1, stream="pairs/train",
    )(np.arange(24))  # fmt: skip
    assert batch.present.all()
    assert (batch.answers != IGNORE).any()
    if not labelled:
        batch.answers.fill_(IGNORE)
    torch.manual_seed(0)
    module = VisionLanguageModule(job, job.model).eval()
    with torch.no_grad():
        out = module(batch, step=0).lxmert
        by = divisors(torch.tensor(Counts.of(batch), dtype=torch.float64), job.objectives.region_rate)
        ours = {name: float(each.loss / by[name]) for name, each in loss_sums(out, batch, job.objectives).items()}
        theirs = stock(module.lxmert).eval()
        labels = torch.full_like(batch.tokens, IGNORE).flatten().scatter(0, batch.masked, batch.labels)
        masked = torch.zeros(batch.present.numel()).scatter(0, batch.masked_regions, 1.0).view_as(batch.object_scores)
        total = theirs(
            input_ids=batch.corrupted,
            visual_feats=batch.corrupted_features(),
            visual_pos=batch.boxes,
            attention_mask=(batch.corrupted != MaskingVocabulary.of(prepared.tokenizer).pad).float(),
            labels=labels.view_as(batch.tokens),
            matched_label=batch.matched,
            obj_labels={
                "obj": (batch.object_ids, batch.object_scores),
                "attr": (batch.attribute_ids, batch.attribute_scores),
                "feat": (batch.features, masked),
            },
            ans=batch.answers,
        ).loss
    assert all(value > 0.01 for name, value in ours.items() if name != "answers")
    if labelled:
        assert ours["answers"] > 0.01
        assert sum(ours.values()) == pytest.approx(float(total), rel=1e-5)
    else:
        assert ours["answers"] == 0
        assert bool(total.isnan())
