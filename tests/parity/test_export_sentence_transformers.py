"""Our sentence-transformers folders: the legacy form to the letter, and our embeddings from the installed release.

And its own folders: their ids are read as it gives them.
"""

from __future__ import annotations

import json
import random
import socket

import pytest
import torch
from safetensors.torch import load_file

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.convert import sentence_transformers as st
from capt.pretrain.convert.encoder import export_encoder
from capt.pretrain.convert.reference import LONG_TEXT, TEXTS, embed, tokenize
from tests.unit.convert.models import CARD, config, model, tokenizer
from tests.unit.tokenizer import test_folders as folders

ROOT_FILES = [
    "1_Pooling", "2_Dense", "3_Dense", "4_Normalize", "README.md", "config.json", "config_sentence_transformers.json",
    "model.safetensors", "modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip


def read(path):
    return json.loads(path.read_text())


def export(out, cfg, *, contrast=True, **options):
    made = model(cfg, contrast=contrast)
    export_encoder("sentence-transformers", made.state_dict(), cfg, tokenizer(), out, CARD, **options)
    return made


def test_files_are_those_of_old_releases(tmp_path):
    """The literal content that sentence-transformers 2 to 5.3 wrote, and that serving tools parse."""
    cfg = config()
    made = export(tmp_path / "out", cfg, max_length=20)
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == ROOT_FILES
    assert read(out / "modules.json") == [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 4, "name": "4", "path": "4_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    assert read(out / "1_Pooling" / "config.json") == {
        "word_embedding_dimension": 48,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
    }
    assert read(out / "2_Dense" / "config.json") == {
        "in_features": 48, "out_features": 80, "bias": True, "activation_function": "torch.nn.modules.activation.GELU",
    }  # fmt: skip
    assert read(out / "3_Dense" / "config.json") == {
        "in_features": 80, "out_features": 48, "bias": True, "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    assert read(out / "sentence_bert_config.json") == {"max_seq_length": 20, "do_lower_case": False}
    settings = read(out / "config_sentence_transformers.json")
    assert settings.pop("__version__").keys() == {"transformers", "pytorch"}
    assert settings == {
        "model_type": "SentenceTransformer", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine",
    }  # fmt: skip
    assert read(out / "config.json")["architectures"] == ["RobertaModel"]
    dense = load_file(out / "2_Dense" / "model.safetensors")
    assert dense.keys() == {"linear.weight", "linear.bias"}
    assert torch.equal(dense["linear.weight"], made.aggregation.inner.weight)


@pytest.mark.parametrize(
    ("pooling", "changes"), [("head", {}), ("head", {"pooling": "mean"}), ("mean", {}), ("cls", {"pooling": "mean"})]
)
def test_embeddings_are_ours_without_network(tmp_path, monkeypatch, pooling, changes):
    from sentence_transformers import SentenceTransformer

    cfg = config(**changes)
    made = export(tmp_path / "out", cfg, pooling=pooling, max_length=30)

    def no_network(*args):
        raise AssertionError("the export was looked up on the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    texts = [*TEXTS, LONG_TEXT]
    theirs = loaded.encode(texts, convert_to_tensor=True)
    with torch.no_grad():
        ours = embed(made, tokenize(texts, tokenizer(), 30), pooling)
    assert loaded.max_seq_length == 30
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours @ ours.T)[0, 1:].abs().max() < 0.999, "texts that all look alike prove nothing"


def test_a_model_without_head_says_so_and_exports_its_mean(tmp_path):
    with pytest.raises(CheckpointError, match=r"no aggregation head.*--pooling mean"):
        export(tmp_path / "out", config(), contrast=False)
    assert list(tmp_path.iterdir()) == []
    export(tmp_path / "out", config(), contrast=False, pooling="mean")
    assert [module["path"] for module in read(tmp_path / "out" / "modules.json")] == ["", "1_Pooling", "2_Normalize"]


@pytest.mark.parametrize("mistake", ["activation", "pooling"])
def test_a_wrong_export_is_refused_and_leaves_nothing(tmp_path, monkeypatch, mistake):
    if mistake == "activation":
        monkeypatch.setattr(st, "_GELU", "torch.nn.modules.activation.ReLU")
    else:
        monkeypatch.setitem(st._MODE_OF, "cls", "pooling_mode_mean_tokens")
    with pytest.raises(CheckpointError, match="nothing written"):
        export(tmp_path / "out", config())
    assert list(tmp_path.iterdir()) == []


def test_lower_case_of_its_folders(tmp_path):
    """Its file, beside a tokenizer that keeps capitals, changes ids although no file of transformers says so."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    bert = BertModel(BertConfig(vocab_size=400, max_position_embeddings=64, **sizes))
    lowered = 0
    for number in range(24):
        folder, rng = tmp_path / str(number), random.Random(number)
        bert.save_pretrained(folder)
        folders.write(folder, rng)
        before = folders.opened(folder)
        if isinstance(before, str):
            continue
        options = {"max_seq_length": 32, "do_lower_case": rng.random() < 0.7}
        (folder / f"sentence_{rng.choice(('bert', 'xlm-roberta'))}_config.json").write_text(json.dumps(options))
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        ours = folders.opened(folder)
        if isinstance(ours, str):
            assert "is random" in ours, "lower case makes two added tokens one"
            continue
        theirs = SentenceTransformer(str(folder), device="cpu").tokenizer
        for text in folders.TEXTS:
            ids = ours.backend.encode(text, add_special_tokens=False).ids
            assert ids == theirs(text, add_special_tokens=False)["input_ids"], f"{text!r}\n{folders.content(folder)}"
            lowered += ids != before.backend.encode(text, add_special_tokens=False).ids
    assert lowered > 10
