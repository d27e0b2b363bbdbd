"""Stock transformers encoders evaluated beside ours: the numbers are those of transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import RobertaConfig as HfConfig
from transformers import RobertaForMaskedLM

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.language.evaluate import Representations, evaluate
from capt.pretrain.language.load import load_hf
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.models.hf_map import HEAD_FILE
from capt.tokenizer.train import train
from tests.unit.language.test_evaluate import sentences

HIDDEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "roberta"
    train(sentences(400, 1), folder, vocab_size=120, type="bpe", byte_fallback=False)
    torch.manual_seed(0)
    config = HfConfig(
        vocab_size=120,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=42,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        initializer_range=0.2,
    )
    RobertaForMaskedLM(config).eval().save_pretrained(folder)
    return folder


def test_representations_are_those_of_transformers(folder: Path) -> None:
    trained = load_hf(folder)
    texts = ["a bird", *sentences(3, 7)]
    rows = Representations(trained, ("cls", "mean")).encode_texts(texts)
    model = RobertaForMaskedLM.from_pretrained(folder).eval()
    for text, row in zip(texts, rows, strict=True):
        special = trained.tokenizer.special
        ids = torch.tensor([[special.bos, *trained.tokenizer.encode_batch([text])[0].tolist(), special.eos]])
        with torch.no_grad():
            hidden = model.roberta(ids).last_hidden_state[0].numpy()
        np.testing.assert_allclose(row, np.concatenate([hidden[0], hidden.mean(0)]), atol=2e-5)


def test_it_is_evaluated_without_a_head_that_nobody_trained(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(sentences(60, 3)) + "\n")
    trained = load_hf(folder)
    assert trained.job.data.sequence_length == 40
    found = evaluate(trained, text=[text], length=24)
    assert found["checkpoint"] == str(folder)
    assert list(found["sections"][0]["poolers"]) == ["cls", "mean"]
    with pytest.raises(CheckpointError, match="no aggregation head"):
        evaluate(trained, text=[text], poolers=["head"])


def test_a_head_beside_the_model_is_used(folder: Path) -> None:
    shapes = {"inner.weight": (64, HIDDEN), "inner.bias": (64,), "outer.weight": (HIDDEN, 64), "outer.bias": (HIDDEN,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    try:
        save_file(tensors, folder / HEAD_FILE, {"pooling": "mean"})
        trained = load_hf(folder)
    finally:
        (folder / HEAD_FILE).unlink()
    assert trained.model.config.pooling == "mean"
    mean, head = np.split(Representations(trained, ("mean", "head")).encode_texts(["a bird"]), 2, axis=1)
    inner = torch.nn.functional.gelu(torch.tensor(mean) @ tensors["inner.weight"].T + tensors["inner.bias"])
    outer = inner @ tensors["outer.weight"].T + tensors["outer.bias"]
    np.testing.assert_allclose(head, (outer / outer.norm()).numpy(), atol=1e-5)


def test_what_is_one(folder: Path, tmp_path: Path) -> None:
    assert is_hf(folder)
    assert not is_hf(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_hf(tmp_path)
