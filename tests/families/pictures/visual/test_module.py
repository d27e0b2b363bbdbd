"""The model and its losses against literal equations, and against the pretraining model's own answer head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.finetune.batches import Batch
from capt.finetune.visual.config import TASKS
from capt.finetune.visual.module import PictureClassifier
from capt.finetune.visual.objective import AnswerObjective, TruthObjective
from capt.finetune.visual.rows import PictureInputs
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel
from tests.visual import ENCODER

_SIZES = {"vocab_size": 40, "pad_id": 1, "feature_size": 7, "object_classes": 0, "attribute_classes": 0}


def _config(answers: int = 0) -> LxmertConfig:
    return LxmertConfig(**ENCODER, **_SIZES, answers=answers, dropout=0.0, attention_dropout=0.0)


def _inputs(n: int, pictures: int, dtype: torch.dtype = torch.float32) -> PictureInputs:
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(2, 40, (n, 6), generator=generator)
    tokens[0, 4:] = 1
    features = torch.randn(n, pictures, 5, 7, generator=generator).to(dtype)
    boxes = torch.rand(n, pictures, 5, 4, generator=generator).to(dtype)
    present = torch.ones(n, pictures, 5, dtype=torch.bool)
    present[-1, 0, 2:] = False
    return PictureInputs(tokens, features, boxes, present, True)


def test_the_loss_of_questions_is_the_literal_one() -> None:
    """Sum over answers, mean over questions, of -t log s(x) - (1 - t) log(1 - s(x)), by a loop in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(5, 9, generator=generator, dtype=torch.float64)
    targets = torch.rand(5, 9, generator=generator, dtype=torch.float64) * (logits > 1)
    expected = 0.0
    for row in range(5):
        for answer in range(9):
            x, t = float(logits[row, answer]), float(targets[row, answer])
            s = 1 / (1 + math.exp(-x))
            expected -= t * math.log(s) + (1 - t) * math.log(1 - s)
    objective = AnswerObjective(TASKS["vqa"])
    assert float(objective.loss(logits, targets)) == pytest.approx(expected / 5, rel=1e-12)
    results = objective.row_results(logits, Batch(_inputs(5, 1), targets))
    assert float(results["loss"].mean()) == pytest.approx(expected / 5, rel=1e-12)
    assert results["answer"].tolist() == np.argmax(logits.numpy(), 1).tolist()


def test_the_loss_of_statements_is_the_literal_one() -> None:
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.tensor([0, 1, 1, 0, 1, 0])
    expected = 0.0
    for (false, true), t in zip(logits.tolist(), truth.tolist(), strict=True):
        expected -= (true if t else false) - math.log(math.exp(false) + math.exp(true))
    assert float(TruthObjective(TASKS["nlvr2"]).loss(logits, truth)) == pytest.approx(expected / 6, rel=1e-12)


def _pretraining_logits(model: LxmertModel, inputs: PictureInputs, picture: int) -> Tensor:
    assert inputs.present is not None
    n = len(inputs.tokens)
    none = torch.empty(0, dtype=torch.long)
    features = inputs.features[:, picture]
    output = model(
        inputs.tokens, inputs.tokens, none, none, features, features, inputs.boxes[:, picture],
        inputs.present[:, picture], padded=True,
    )  # fmt: skip
    assert output.answers is not None
    assert output.answers.shape[0] == n
    return output.answers


def test_one_picture_gives_the_logits_of_the_pretraining_model() -> None:
    torch.manual_seed(0)
    pretraining = LxmertModel(_config(answers=5), contrast=False).eval()
    ours = PictureClassifier(_config(), 5, 1).eval()
    state = pretraining.state_dict()
    ours.load_state_dict({name: state[name] for name in ours.state_dict()})
    inputs = _inputs(4, 1)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), _pretraining_logits(pretraining, inputs, 0), rtol=1e-6, atol=1e-6)


def test_two_pictures_are_pooled_side_by_side_left_first() -> None:
    torch.manual_seed(0)
    model = PictureClassifier(_config(), 2, 2).eval().double()
    inputs = _inputs(3, 2, torch.float64)
    pooled = []
    assert inputs.present is not None
    for number in range(3):
        sides = []
        for k in range(2):
            there = inputs.present[number, k]
            first = model.encoder.first(
                inputs.tokens[number : number + 1], inputs.features[number : number + 1, k, there],
                inputs.boxes[number : number + 1, k, there], padded=True, present=None,
            )  # fmt: skip
            sides.append(model.pooler(first))
        pooled.append(torch.cat(sides, 1))
    expected = model.answer_head(torch.cat(pooled)).float()
    torch.testing.assert_close(model(*inputs), expected)
    swapped = inputs._replace(
        features=inputs.features.flip(1), boxes=inputs.boxes.flip(1), present=inputs.present.flip(1)
    )
    assert (model(*swapped) - expected).abs().max() > 1e-4


def test_half_precision_features_are_read_as_the_weights_are() -> None:
    torch.manual_seed(0)
    model, inputs = PictureClassifier(_config(), 3, 1), _inputs(2, 1)
    halved = inputs._replace(features=inputs.features.half())
    outputs = model(*halved)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, model(*inputs._replace(features=inputs.features.half().float())))
