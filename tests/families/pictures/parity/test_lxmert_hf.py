"""Our LXMERT and transformers': outputs of every head, every loss, gradients, and files in both directions."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.convert import lxmert
from capt.pretrain.convert.lxmert import export_lxmert
from capt.pretrain.models.lxmert.hf_config import hf_keys
from capt.pretrain.models.lxmert.model import build_model, start_from
from capt.pretrain.models.lxmert.read import HEADS, from_hf, read_lxmert, to_hf
from tests.families.pictures.lxmert.support import (
    ANSWERS,
    ATTRIBUTES,
    OBJECTS,
    REGIONS,
    pairs,
    small_config,
    small_model,
)
from tests.unit.convert.models import CARD, tokenizer

NORMALIZER = 1 / 0.15
TOLERANCE = 1e-5
LABELS = tuple(f"answer {i}" for i in range(ANSWERS))


def stock(model, architecture="LxmertForPreTraining"):
    """transformers' model with our weights, in double precision where ours is."""
    config = model.config
    keys = hf_keys(config, architecture=architecture, bos_id=2, eos_id=3, answers=None)
    made = getattr(transformers, architecture)(transformers.LxmertConfig(**keys)).to(next(model.parameters()).dtype)
    groups = ("pooler", "answer_head") if architecture.endswith("Answering") else tuple(HEADS)
    missing, unexpected = made.load_state_dict(to_hf(model.state_dict(), config, groups), strict=False)
    assert unexpected == []
    assert set(missing) <= {"cls.predictions.decoder.weight"}
    made.tie_weights()
    return made


def targets(batch):
    """Labels of every objective; half of the pairs have no answer."""
    generator = torch.Generator().manual_seed(3)
    n = len(batch.tokens)
    shape = (n, REGIONS)
    found = {
        "objects": torch.randint(0, OBJECTS, shape, generator=generator),
        "attributes": torch.randint(0, ATTRIBUTES, shape, generator=generator),
        "object_scores": torch.rand(shape, generator=generator, dtype=batch.features.dtype),
        "attribute_scores": torch.rand(shape, generator=generator, dtype=batch.features.dtype),
        "matched": torch.randint(0, 2, (n,), generator=generator),
        "answers": torch.randint(0, ANSWERS, (n,), generator=generator),
    }
    found["answers"][::2] = -100
    return found


def our_losses(model, batch, target) -> dict[str, Tensor]:
    """LXMERT's loss terms, written from airsplay's formulas, on what our model gives."""
    out = model(**batch.inputs)
    objects = F.cross_entropy(out.objects.flatten(0, 1), target["objects"].flatten(), reduction="none")
    attributes = F.cross_entropy(out.attributes.flatten(0, 1), target["attributes"].flatten(), reduction="none")
    features = F.smooth_l1_loss(out.features, batch.features, reduction="none").mean(-1)
    return {
        "mlm": out.mlm.loss_sum / out.mlm.masked,
        "matching": F.cross_entropy(out.matching, target["matched"]),
        "objects": (objects * target["object_scores"].flatten()).mean() * NORMALIZER,
        "attributes": (attributes * target["attribute_scores"].flatten()).mean() * NORMALIZER,
        "features": (features * batch.zeroed).mean() * NORMALIZER,
        "answers": F.cross_entropy(out.answers, target["answers"], ignore_index=-100),
    }


def stock_arguments(batch):
    return {
        "input_ids": batch.corrupted,
        "visual_feats": batch.corrupted_features,
        "visual_pos": batch.boxes,
        "attention_mask": (batch.corrupted != 0).to(batch.features.dtype),
        "visual_attention_mask": None if batch.present is None else batch.present.to(batch.features.dtype),
    }


def stock_losses(theirs, batch, target) -> dict[str, Tensor]:
    """Every term of ``LxmertForPreTraining`` alone, by its labels, and their total."""
    labels = torch.full_like(batch.tokens, -100).flatten().scatter(0, batch.masked, batch.labels).view_as(batch.tokens)
    off = torch.zeros_like(target["object_scores"])
    of_regions = {
        "obj": (target["objects"], target["object_scores"]),
        "attr": (target["attributes"], target["attribute_scores"]),
        "feat": (batch.features, batch.zeroed.to(batch.features.dtype)),
    }

    def term(**given):
        return theirs(**stock_arguments(batch), **given).loss

    def alone(key):
        return {"obj_labels": {name: (x, w if name == key else off) for name, (x, w) in of_regions.items()}}

    return {
        "mlm": term(labels=labels),
        "matching": term(matched_label=target["matched"]),
        "objects": term(**alone("obj")),
        "attributes": term(**alone("attr")),
        "features": term(**alone("feat")),
        "answers": term(ans=target["answers"]),
        "total": term(labels=labels, matched_label=target["matched"], obj_labels=of_regions, ans=target["answers"]),
    }


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    scale = theirs.abs().max().clamp_min(1e-12)
    assert float(((ours - theirs).abs().max() / scale).detach()) <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, TOLERANCE)])
@pytest.mark.parametrize(("padded", "missing"), [(False, False), (True, True)])
def test_outputs_losses_and_gradients(padded, missing, dtype, tolerance):
    model = small_model(contrast=False, dtype=dtype).eval()
    theirs = stock(model).eval()
    batch = pairs(padded=padded, missing=missing, dtype=dtype)
    target = targets(batch)

    out = model(**batch.inputs)
    expected = theirs(**stock_arguments(batch), output_hidden_states=True)
    words = expected.prediction_logits.flatten(0, 1)[batch.masked]
    reference = F.cross_entropy(words, batch.labels, reduction="sum")
    close(out.mlm.loss_sum, reference, tolerance)
    assert int(out.mlm.correct) == int((words.argmax(-1) == batch.labels).sum())
    close(out.matching, expected.cross_relationship_score, tolerance)
    close(out.answers, expected.question_answering_score, tolerance)
    of_regions = theirs.obj_predict_head(expected.vision_hidden_states[-1])
    real = torch.ones_like(batch.zeroed) if batch.present is None else batch.present
    for ours, key in ((out.objects, "obj"), (out.attributes, "attr"), (out.features, "feat")):
        close(ours[real], of_regions[key][real], tolerance)

    mine, stocks = our_losses(model, batch, target), stock_losses(theirs, batch, target)
    mine["total"] = torch.stack(list(mine.values())).sum()
    assert mine.keys() == stocks.keys()
    for name, value in mine.items():
        assert float(value.detach()) > 0.05, name
        close(value, stocks[name], max(tolerance, 1e-6))  # transformers adds its losses up in fp32
    mine["total"].backward()
    stocks["total"].backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    config = small_config()
    found = from_hf(grads, config, "gradients")
    scale = max(float(g.abs().max()) for g in grads.values())
    for name, parameter in model.named_parameters():
        difference = float((parameter.grad - found[name]).abs().max())
        assert difference <= tolerance * scale * 10, name


def test_dropout_is_in_the_same_places(monkeypatch):
    """Dropout that scales by a half, and drops nothing: a place that we forgot or invented changes the output."""
    from capt.pretrain.models import layers

    model = small_model(contrast=False).train()
    theirs = stock(model).train()

    def keep(shape, p, dtype):
        return torch.ones(shape, dtype=dtype), 0.5

    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x * 0.5)
    monkeypatch.setattr(layers, "keep_mask", keep)
    monkeypatch.setattr(layers, "keep_mask", keep)
    batch = pairs()
    out = model(**batch.inputs)
    expected = theirs(**stock_arguments(batch), output_hidden_states=True)
    close(out.matching, expected.cross_relationship_score, 1e-12)
    of_regions = theirs.obj_predict_head(expected.vision_hidden_states[-1])
    close(out.features[batch.present], of_regions["feat"][batch.present], 1e-12)


def test_a_picture_without_regions_is_as_in_transformers():
    model = small_model(contrast=False).eval()
    theirs = stock(model).eval()
    batch = pairs()
    nothing = batch.present.clone()
    nothing[2] = False
    features, boxes = batch.features * nothing.unsqueeze(-1), batch.boxes * nothing.unsqueeze(-1)
    ours = model.pooler(model.encoder.first(batch.tokens, features, boxes, padded=True, present=nothing))
    mask = (batch.tokens != 0).double()
    reference = theirs.lxmert(
        batch.tokens, features, boxes, attention_mask=mask, visual_attention_mask=nothing.double()
    ).pooled_output
    close(ours, reference, 1e-12)


def test_folders_of_others_are_read(tmp_path):
    model = small_model(contrast=False, dtype=torch.float32, hidden=64, heads=1).eval()
    theirs = stock(model).eval()
    source = tmp_path / "folder"
    theirs.save_pretrained(source)
    keys = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(keys | {"id2label": {i: x for i, x in enumerate(LABELS)}}))
    read = read_lxmert(source)
    assert read.answers == LABELS
    assert read.tokenizer is None
    ours = build_model(read.state, read.config, str(source))
    for name in ("language_layers", "vision_layers", "cross_layers", "hidden", "heads", "ffn", "vocab_size", "pad_id",
                 "max_positions", "feature_size", "object_classes", "attribute_classes", "answers"):  # fmt: skip
        assert getattr(ours.config, name) == getattr(model.config, name), name
    batch = pairs(dtype=torch.float32)
    close(ours(**batch.inputs).matching, theirs(**stock_arguments(batch)).cross_relationship_score, TOLERANCE)
    again = small_model(dtype=torch.float32, hidden=64, heads=1, answers=5, seed=1)
    before = again.answer_head.outer.weight.clone()
    start_from(again, read, "file")
    assert torch.equal(again.answer_head.outer.weight, before)
    assert torch.equal(again.answer_head.inner.weight, model.answer_head.inner.weight)
    assert torch.equal(again.encoder.words.word.weight, model.encoder.words.word.weight)


def for_export(**fields):
    used = tokenizer("wordpiece")
    return small_model(
        dtype=torch.float32, vocab_size=used.vocab_size, pad_id=used.special.pad, max_positions=37, **fields
    ).eval()


@pytest.mark.parametrize("architecture", ["LxmertForPreTraining", "LxmertForQuestionAnswering"])
def test_exported_folders_compute_the_same(tmp_path, architecture):
    model = for_export()
    out = tmp_path / "out"
    export_lxmert(
        model.state_dict(), model.config, tokenizer("wordpiece"), out, CARD, architecture=architecture, answers=LABELS
    )
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "capt_head.safetensors", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    loaded = getattr(transformers, architecture).from_pretrained(out).eval()
    assert tuple(loaded.config.id2label[i] for i in range(ANSWERS)) == LABELS
    assert loaded.config.num_hidden_layers == {"vision": 1, "cross_encoder": 2, "language": 3}
    assert loaded.config.visual_loss_normalizer == NORMALIZER
    batch = pairs(dtype=torch.float32)
    tokens = batch.tokens.clamp_max(tokenizer("wordpiece").vocab_size - 1)
    first = model.encoder.first(tokens, batch.features, batch.boxes, padded=True, present=batch.present)
    mask = (tokens != 0).float()
    theirs = loaded(
        tokens, batch.features, batch.boxes, attention_mask=mask, visual_attention_mask=batch.present.float()
    )
    close(model.answer_head(model.pooler(first)), theirs.question_answering_score, TOLERANCE)
    read = read_lxmert(out)
    assert read.answers == LABELS
    assert read.tokenizer.fingerprint == tokenizer("wordpiece").fingerprint
    own = model.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in read.state.items())
    if architecture == "LxmertForPreTraining":
        assert read.state.keys() == own.keys()


def test_heads_that_are_absent_are_switched_off(tmp_path):
    model = for_export(object_classes=0, attribute_classes=0, answers=0)
    export_lxmert(
        model.state_dict(), model.config, tokenizer("wordpiece"), tmp_path / "out", CARD,
        architecture="LxmertForPreTraining",
    )  # fmt: skip
    loaded = transformers.LxmertForPreTraining.from_pretrained(tmp_path / "out")
    assert (loaded.config.visual_obj_loss, loaded.config.visual_attr_loss, loaded.config.task_qa) == (False,) * 3
    assert read_lxmert(tmp_path / "out").config.object_classes == 0


def test_a_wrong_export_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    model = for_export()
    real = lxmert.to_hf
    att = "lxmert.encoder.x_layers.1.visual_attention.att."

    def swapped(*args):
        named = real(*args)
        return named | {
            f"{att}query.weight": named[f"{att}key.weight"],
            f"{att}key.weight": named[f"{att}query.weight"],
        }

    monkeypatch.setattr(lxmert, "to_hf", swapped)
    with pytest.raises(CheckpointError, match="differs from our model"):
        export_lxmert(
            model.state_dict(), model.config, tokenizer("wordpiece"), tmp_path / "out", CARD,
            architecture="LxmertForPreTraining",
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_what_transformers_cannot_compute_is_refused(tmp_path):
    model = for_export(layer_norm_eps=1e-5)
    with pytest.raises(CheckpointError, match="layer_norm_eps is 1e-05"):
        export_lxmert(
            model.state_dict(), model.config, tokenizer("wordpiece"), tmp_path / "out", CARD,
            architecture="LxmertForPreTraining",
        )  # fmt: skip


@pytest.mark.parametrize("sharing", [False, True])
def test_released_layout_of_weights_is_read(tmp_path, sharing):
    """A bare ``LxmertModel``, and a file that holds the tied matrix twice: equal copies pass, others do not."""
    model = small_model(contrast=False, dtype=torch.float32).eval()
    theirs = stock(model)
    if not sharing:
        theirs.lxmert.save_pretrained(tmp_path / "bare")
        read = read_lxmert(tmp_path / "bare")
        assert {name.split(".")[0] for name in read.state} == {"encoder", "pooler"}
        assert read.config.answers == 0
        return
    theirs.save_pretrained(tmp_path / "twice")
    state = {name: x.clone().contiguous() for name, x in theirs.state_dict().items()}
    save_file(state, tmp_path / "twice" / "model.safetensors")
    assert read_lxmert(tmp_path / "twice").config.vocab_size == model.config.vocab_size
    state["cls.predictions.decoder.weight"] += 1
    save_file(state, tmp_path / "twice" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.decoder\.weight differs"):
        read_lxmert(tmp_path / "twice")
