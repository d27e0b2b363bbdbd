"""Our ONNX graphs in onnxruntime."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.convert.encoder import export_encoder
from capt.pretrain.convert.onnx import check_onnx
from capt.pretrain.convert.reference import embed
from capt.pretrain.models.capt import build_model
from tests.unit.convert.models import CARD, config, model, tokenizer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    cfg = config()
    made = model(cfg)
    out = tmp_path_factory.mktemp("onnx") / "out"
    export_encoder("onnx", made.state_dict(), cfg, tokenizer(), out, CARD)
    return made, out


def test_folder_has_what_a_user_needs(exported):
    _, out = exported
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("n", "length"), [(1, 1), (1, 2), (1, 37), (2, 7), (5, 11), (33, 3)])
def test_outputs_are_ours_for_any_shape(exported, n, length):
    onnxruntime = pytest.importorskip("onnxruntime")
    made, out = exported
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    tokens = torch.randint(5, 600, (n, length), generator=torch.Generator().manual_seed(n * length))
    for row in range(1, n):
        tokens[row, max(1, length - row) :] = 1
    real = tokens != 1
    # what is under the mask must not matter
    fed = torch.where(real, tokens, torch.full_like(tokens, 7))
    sentences, hidden = session.run(
        ["sentence_embedding", "last_hidden_state"],
        {"input_ids": fed.numpy(), "attention_mask": real.long().numpy()},
    )
    with torch.no_grad():
        assert (embed(made, tokens, "head") - torch.from_numpy(sentences)).abs().max() < 1e-5
        ours = made.encode(tokens, padded=True)
    assert (ours - torch.from_numpy(hidden))[real].abs().max() < 1e-5 * max(1.0, float(ours.abs().max()))


def test_axes_are_dynamic_and_named(exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(exported[1] / "model.onnx", providers=["CPUExecutionProvider"])
    assert {x.name: (x.type, x.shape) for x in session.get_inputs()} == {
        "input_ids": ("tensor(int64)", ["batch", "sequence"]),
        "attention_mask": ("tensor(int64)", ["batch", "sequence"]),
    }
    assert {x.name: x.shape for x in session.get_outputs()} == {
        "sentence_embedding": ["batch", 48],
        "last_hidden_state": ["batch", "sequence", 48],
    }


def test_a_wrong_graph_is_refused(exported):
    made, out = exported
    assert check_onnx(made, tokenizer(), out, "head", 0) < 1e-5
    with pytest.raises(CheckpointError, match=r"sentence_embedding.*nothing written"):
        check_onnx(made, tokenizer(), out, "cls", 0)
    other = build_model({**made.state_dict(), "encoder.layers.0.ffn_in.bias": torch.ones(80)}, made.config, "here")
    with pytest.raises(CheckpointError, match="nothing written"):
        check_onnx(other, tokenizer(), out, "head", 0)


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "onnxscript" else real(name, *args)
    )
    cfg = config()
    with pytest.raises(ConfigError, match=r"needs (onnx, )?onnxscript(, onnxruntime)?: pip install '\.\[onnx\]'"):
        export_encoder("onnx", model(cfg).state_dict(), cfg, tokenizer(), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []
