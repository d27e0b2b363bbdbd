from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from capt.pretrain.base.errors import DataError
from capt.pretrain.models import layers
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel
from tests.families.pictures.lxmert.support import LENGTH, REGIONS, pairs, small_model, total
from tests.unit.models.support import assert_same, gradients

KNOWN = {"vocab_size": 30_522, "pad_id": 0, "feature_size": 2048, "object_classes": 1600, "attribute_classes": 400}


def test_lxmert_has_the_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        model = LxmertModel(LxmertConfig(size="base", answers=9500, **KNOWN), contrast=False)
    assert sum(p.numel() for p in model.parameters()) == 228_051_752
    assert sum(p.numel() for part in (model.encoder, model.pooler) for p in part.parameters()) == 207_936_768


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_what_is_read_equals_the_full_computation(padded: bool, missing: bool) -> None:
    model = small_model(contrast=False).eval()
    batch = pairs(padded=padded, missing=missing)
    arguments = (batch.corrupted, batch.corrupted_features, batch.boxes)
    options = {"padded": padded, "present": batch.present}
    read = torch.tensor([0, 3, LENGTH, 2 * LENGTH + 1, 4 * LENGTH])
    full = model.encoder(*arguments, **options)
    part = model.encoder(*arguments, **options, read=read, pictures=2)
    torch.testing.assert_close(part.words, full.words.flatten(0, 1)[read], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.regions, full.regions[-2:], rtol=1e-12, atol=1e-12)
    w, r = torch.randn_like(part.words), torch.randn_like(part.regions)
    of_full = (full.words.flatten(0, 1)[read] * w).sum() + (full.regions[-2:] * r).sum()
    assert_same(gradients(model, (part.words * w).sum() + (part.regions * r).sum()), gradients(model, of_full), 1e-9)
    first = model.encoder.first(*arguments, **options)
    torch.testing.assert_close(first, full.words[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("contrast", [False, True])
def test_packed_sentences_equal_padded_ones(contrast: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a CPU, which leaves padding out, and that of a GPU, which masks it."""
    found = []
    for packs in (True, False):
        monkeypatch.setattr(layers, "prefers_packing", lambda x, packs=packs: packs)
        dtype = torch.float32 if autocast else torch.float64
        model = small_model(contrast, dtype, dropout=0.0, attention_dropout=0.0).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(**pairs(dtype=dtype).inputs)
        found.append(gradients(model, total(out)) | {"matching": out.matching, "objects": out.objects})
    assert_same(found[0], found[1], 8e-2 if autocast else 1e-9)


def test_both_views_in_one_pass_equal_two_passes() -> None:
    model = small_model().eval()
    batch = pairs()
    out = model(**batch.inputs)
    options = {"present": batch.present, "padded": True}
    s = model.embed(batch.tokens, batch.features, batch.boxes, **options)
    s_hat = model.embed(batch.corrupted, batch.corrupted_features, batch.boxes, **options)
    torch.testing.assert_close(out.s, s, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.s_hat, s_hat, rtol=1e-12, atol=1e-12)
    assert float((s - s_hat).abs().max().detach()) > 1e-3
    alone = small_model(contrast=False).eval()
    alone.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("aggregation")})
    of_baseline = alone(**batch.inputs)
    assert of_baseline.s is None
    for name in ("matching", "objects", "attributes", "features", "answers"):
        torch.testing.assert_close(getattr(out, name), getattr(of_baseline, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.mlm.loss_sum, of_baseline.mlm.loss_sum, rtol=1e-12, atol=1e-12)


def test_pooled_states_can_feed_the_aggregation_head() -> None:
    raw, pooled = small_model().eval(), small_model(pooling="pooled").eval()
    batch = pairs()
    a, b = raw(**batch.inputs), pooled(**batch.inputs)
    torch.testing.assert_close(a.matching, b.matching, rtol=1e-12, atol=1e-12)
    assert float((a.s - b.s).abs().max().detach()) > 1e-3
    s = pooled.embed(batch.tokens, batch.features, batch.boxes, batch.present, padded=True)
    torch.testing.assert_close(b.s, s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_padding_and_absent_regions_change_nothing(training: bool) -> None:
    """In training mode with a dropout that keeps everything the attention has a kernel of its own."""
    rate = 1e-9 if training else 0.0
    model = small_model(dropout=0.0, attention_dropout=rate).train(training)
    batch = pairs()
    out = model(**batch.inputs)
    garbage = torch.where(batch.present.unsqueeze(-1), batch.features, 7.0)
    boxes = torch.where(batch.present.unsqueeze(-1), batch.boxes, 0.3)
    other = model(**replace(batch, features=garbage, corrupted_features=garbage.masked_fill(
        batch.zeroed.unsqueeze(-1), 0.0), boxes=boxes).inputs)  # fmt: skip
    for name in ("s", "s_hat", "matching", "answers"):
        torch.testing.assert_close(getattr(out, name), getattr(other, name), rtol=1e-12, atol=1e-12)
    real = batch.present
    torch.testing.assert_close(out.objects[real], other.objects[real], rtol=1e-12, atol=1e-12)
    short = torch.cat([batch.tokens, torch.zeros(len(batch.tokens), 4, dtype=torch.long)], 1)
    longer = model.embed(short, batch.features, batch.boxes, batch.present, padded=True)
    torch.testing.assert_close(longer, out.s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_picture_without_regions_gives_finite_numbers(training: bool, autocast: bool) -> None:
    model = small_model(dtype=torch.float32).train(training)
    batch = pairs(dtype=torch.float32)
    present = batch.present.clone()
    present[1] = False
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**replace(batch, present=present).inputs)
    total(out).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert bool(out.s.isfinite().all())
    assert bool(out.objects.isfinite().all())


def test_regressed_regions_and_absent_heads() -> None:
    model = small_model(object_classes=0, attribute_classes=0, answers=0).eval()
    batch = pairs()
    everything = model(**batch.inputs)
    assert everything.objects is None
    assert everything.attributes is None
    assert everything.answers is None
    rows = torch.tensor([0, 5, 3 * REGIONS + 2])
    part = model(**batch.inputs, regressed=rows)
    torch.testing.assert_close(part.features, everything.features.flatten(0, 1)[rows], rtol=1e-12, atol=1e-12)


def test_no_masked_word_gives_a_zero_sum() -> None:
    model = small_model().eval()
    batch = replace(pairs(), masked=torch.zeros(0, dtype=torch.long), labels=torch.zeros(0, dtype=torch.long))
    out = model(**batch.inputs)
    assert out.mlm.loss_sum.item() == 0.0
    assert int(out.mlm.masked) == 0
    total(out).backward()
    assert bool(model.mlm.dense.weight.grad.eq(0).all())


def test_a_sentence_too_long_is_refused() -> None:
    model = small_model()
    batch = pairs()
    tokens = torch.full((5, 20), 7)
    with pytest.raises(DataError, match=r"20 tokens is longer than model.max_positions 19"):
        model.embed(tokens, batch.features, batch.boxes, padded=False)


@pytest.mark.parametrize("contrast", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(contrast: bool, autocast: bool) -> None:
    found = []
    for kind in ("none", "full"):
        model = small_model(contrast, torch.float32, activation_checkpointing=kind).train()
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = total(model(**pairs(dtype=torch.float32).inputs))
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss})
    assert len(found[0]) > 60
    assert_same(found[1], found[0], 0.0)
