"""Start of a fine-tuned model: never a random backbone, answers by their text, features of one kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.finetune.visual.backbone import TRUTHS, start_from
from capt.finetune.visual.module import PictureClassifier
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel
from capt.pretrain.models.lxmert.read import PretrainedLxmert
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.load import FeatureKind, Start, read_features, require_features
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from tests.vision_language import write_small_store
from tests.visual import ENCODER, write_words

_SIZES = {"vocab_size": 40, "pad_id": 1, "feature_size": 7, "object_classes": 3, "attribute_classes": 2}
_BEFORE = ("Yes", "no", "the dog", "dog", "three", "gray")


Make = Callable[..., Start]


@pytest.fixture(scope="module")
def backbone_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    tokenizer = load_tokenizer(write_words(tmp_path_factory.mktemp("words")))
    return lambda answers=_BEFORE: _backbone(tokenizer, answers)


def _backbone(tokenizer: TextTokenizer, answers: tuple[str, ...] | None) -> Start:
    torch.manual_seed(1)
    config = LxmertConfig(**ENCODER, **_SIZES, answers=len(answers or ()))
    model = LxmertModel(config, contrast=True)
    return Start(Path("runs/before"), PretrainedLxmert(config, dict(model.state_dict()), tokenizer, answers))


def _model(outputs: int, pictures: int = 1) -> PictureClassifier:
    torch.manual_seed(2)
    return PictureClassifier(LxmertConfig(**ENCODER, **_SIZES, answers=0), outputs, pictures)


def test_every_weight_of_the_backbone_is_copied(backbone_of: Make) -> None:
    backbone, model = backbone_of(None), _model(2, 2)
    start_from(model, backbone, TRUTHS)
    names = [name for name, _ in model.named_parameters() if not name.startswith("answer_head.")]
    assert len(names) > 50
    for name, parameter in model.named_parameters():
        if name in names:
            assert torch.equal(parameter, backbone.pretrained.state[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("pooler.dense.weight"), "lacks 1 of .* pooler.dense.weight"),
        (
            lambda state: [state.pop(name) for name in list(state) if name.startswith("encoder.cross")],
            r"lacks .*, \.\.\.",
        ),
        (
            lambda state: state.update({"encoder.more": torch.ones(1)}),
            "has no place in the model for its 1 .* encoder.more",
        ),
        (
            lambda state: state.update({"pooler.dense.bias": torch.ones(5)}),
            "has other shapes of 1 .* pooler.dense.bias",
        ),
    ],
)
def test_an_incomplete_backbone_is_refused_by_name(backbone_of: Make, change: Any, message: str) -> None:
    backbone, model = backbone_of(), _model(3)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    change(backbone.pretrained.state)
    with pytest.raises(CheckpointError, match=f"model.init runs/before: {message}"):
        start_from(model, backbone, ("a", "b", "c"))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), "nothing was copied"


def test_answers_are_transplanted_by_their_text(backbone_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Each answer is converted (article, number word, period), LXMERT's loadLXMERTQA; a new one begins at 0.

    An answer that both tables spell alike comes first: "the dog" here, and "dog" for "a dog".
    """
    answers = ("a dog", "zebra", "yes", "3", "grey", "", "the dog")
    backbone, model = backbone_of(), _model(len(answers))
    with caplog.at_level(logging.INFO):
        start_from(model, backbone, answers)
    assert "5 of 7 answers from runs/before, 2 new ones begin at 0" in caplog.text
    before, head = backbone.pretrained.state, model.answer_head
    assert torch.equal(head.inner.weight, before["answer_head.inner.weight"])
    assert torch.equal(head.norm.bias, before["answer_head.norm.bias"])
    for row, source in {0: 3, 2: 0, 3: 4, 4: 5, 6: 2}.items():
        assert torch.equal(head.outer.weight[row], before["answer_head.outer.weight"][source]), answers[row]
        assert torch.equal(head.outer.bias[row], before["answer_head.outer.bias"][source])
    for row in (1, 5):
        assert not head.outer.weight[row].any()
        assert float(head.outer.bias[row].detach()) == 0


def test_heads_of_another_kind_stay_as_initialised(backbone_of: Make) -> None:
    for before, classes, pictures in ((_BEFORE, TRUTHS, 1), (TRUTHS, ("yes", "true"), 1), (TRUTHS, TRUTHS, 2)):
        model = _model(2, pictures)
        fresh = {name: x.clone() for name, x in model.answer_head.state_dict().items()}
        start_from(model, backbone_of(before), classes)
        assert all(torch.equal(x, fresh[name]) for name, x in model.answer_head.state_dict().items())
    model, backbone = _model(2), backbone_of(TRUTHS)
    start_from(model, backbone, TRUTHS)
    assert torch.equal(model.answer_head.outer.weight, backbone.pretrained.state["answer_head.outer.weight"])
    backbone = backbone_of(("0", "true", "1", "false"))
    start_from(model, backbone, TRUTHS)
    assert torch.equal(model.answer_head.outer.weight, backbone.pretrained.state["answer_head.outer.weight"][[3, 1]])


def test_features_of_another_kind_are_refused(tmp_path: Path) -> None:
    store = RegionStore.open(write_small_store(tmp_path / "store", 3))
    mine = FeatureKind.of(store)
    assert read_features(tmp_path) is None
    mine.save(tmp_path)
    assert read_features(tmp_path) == mine
    require_features(store, mine, "runs/before")
    other = mine.model_copy(update={"features_of": {"backend": "detr"}})
    with pytest.raises(CheckpointError, match=r"\(backend is 'test' and 'detr'; .*allow_other_features=true"):
        require_features(store, other, "runs/before", allow_other=False)
    with pytest.raises(CheckpointError, match=r"name a store made in the same way$"):
        require_features(store, other, "runs/before")
    require_features(store, other, "runs/before", allow_other=True)
    with pytest.raises(CheckpointError, match="has 11 features a region, and runs/before was trained on 2048"):
        require_features(store, mine.model_copy(update={"feature_size": 2048}), "runs/before", allow_other=True)
    (tmp_path / "regions.json").write_text('{"feature_size": -1, "features_of": {}}')
    with pytest.raises(CheckpointError, match=r"regions\.json"):
        read_features(tmp_path)
