"""Our folders in transformers, and transformers' folders in our models."""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)
from transformers import RobertaConfig as HFRobertaConfig

from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.convert import huggingface
from capt.pretrain.convert.encoder import export_encoder
from capt.pretrain.convert.reference import TEXTS, tokenize
from capt.pretrain.language.import_hf import command as import_hf
from capt.pretrain.language.load import load_model
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.heads import with_rows
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from tests.unit.convert.models import CARD, config, model, tokenizer


def logits(ours, tokens):
    with torch.no_grad():
        return ours.mlm.logits(ours.encode(tokens, padded=True))


def hf_logits(theirs, tokens, pad):
    with torch.no_grad():
        return theirs.eval()(input_ids=tokens, attention_mask=(tokens != pad).long()).logits


def export(out, cfg, kind="unigram", **options):
    made = model(cfg, **options)
    export_encoder("hf", made.state_dict(), cfg, tokenizer(kind), out, CARD)
    return made


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("unigram", {}), ("bpe", {"pooling": "mean", "layer_norm_eps": 1e-3}), ("wordpiece", {"pad_vocab_to": 1})],
)
def test_logits_and_ids_are_ours(tmp_path, kind, changes):
    cfg = config(kind, **changes)
    made = export(tmp_path / "out", cfg, kind)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is RobertaForMaskedLM
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")(
        list(TEXTS), padding=True, truncation=True, return_tensors="pt"
    )
    tokens = tokenize(TEXTS, tokenizer(kind), cfg.max_positions)
    assert torch.equal(batch["input_ids"], tokens)
    real = tokens != cfg.pad_id
    assert not real.all()
    ours, theirs = logits(made, tokens), hf_logits(loaded, tokens, cfg.pad_id)
    assert ours[real].std() > 0.5
    assert (theirs - ours)[real].abs().max() < 1e-5 * ours[real].abs().max()


def test_folder_is_stock_and_explicit(tmp_path):
    cfg = config()
    made = export(tmp_path / "out", cfg)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "capt_head.safetensors", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "max_position_embeddings": 39,
        "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "vocab_size": 600, "tie_word_embeddings": True, "hidden_act": "gelu",
    }  # fmt: skip
    assert {key: written[key] for key in expected} == expected
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert not [name for name in file.keys() if "decoder" in name or "aggregation" in name]  # noqa: SIM118
    head = load_file(tmp_path / "out" / "capt_head.safetensors")
    for name, tensor in made.aggregation.state_dict().items():
        assert torch.equal(head[name], tensor)
    assert (tmp_path / "out" / "README.md").read_text() == CARD


def test_model_without_contrast_has_no_head_file(tmp_path):
    export(tmp_path / "out", config(), contrast=False)
    assert not (tmp_path / "out" / "capt_head.safetensors").exists()


def change(name, value):
    """Let the writer of ``model.safetensors`` get something wrong."""

    def patch(monkeypatch):
        real = huggingface.to_hf
        monkeypatch.setattr(huggingface, "to_hf", lambda *args: real(*args) | value(real(*args)))

    patch.__name__ = name
    return patch


PREFIX = "roberta.encoder.layer.1."
SWAP = {"q": PREFIX + "attention.self.query.weight", "k": PREFIX + "attention.self.key.weight"}
UNTIED = "lm_head.decoder.weight"
WORD = "roberta.embeddings.word_embeddings.weight"
POSITION = "roberta.embeddings.position_embeddings.weight"


def config_says(**values):
    def patch(monkeypatch):
        real = huggingface.write_json
        monkeypatch.setattr(huggingface, "write_json", lambda path, value: real(path, value | values))

    patch.__name__ = "config_" + "_".join(values)
    return patch


def other_tokenizer(monkeypatch):
    real, wrong = TextTokenizer.save, tokenizer("bpe")
    monkeypatch.setattr(TextTokenizer, "save", lambda self, out, **options: real(wrong, out, **options))


@pytest.mark.parametrize(
    "mistake",
    [
        change("swapped", lambda hf: {SWAP["q"]: hf[SWAP["k"]], SWAP["k"]: hf[SWAP["q"]]}),
        change("untied", lambda hf: {UNTIED: hf[WORD] + 1.0}),
        change("extra", lambda hf: {"roberta.pooler.dense.weight": torch.zeros(48, 48)}),
        change("last_position_lost", lambda hf: {POSITION: hf[POSITION].index_fill(0, torch.tensor([38]), 0.0)}),
        config_says(layer_norm_eps=1e-12),
        config_says(hidden_act="gelu_new"),
        config_says(num_hidden_layers=4),
        other_tokenizer,
    ],
    ids=lambda patch: patch.__name__,
)
def test_a_wrong_export_is_refused_and_leaves_nothing(tmp_path, monkeypatch, mistake):
    cfg = config()
    made = model(cfg)
    mistake(monkeypatch)
    with pytest.raises((CheckpointError, DataError)):
        export_encoder("hf", made.state_dict(), cfg, tokenizer(), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("contrast", [True, False])
def test_hf_to_checkpoint_gives_back_every_weight(tmp_path, contrast):
    cfg = config(pooling="mean")
    made = export(tmp_path / "hf", cfg, contrast=contrast)
    import_hf(tmp_path / "hf", tmp_path / "run")
    trained = load_model(tmp_path / "run")
    assert trained.tokenizer.fingerprint == tokenizer().fingerprint
    assert trained.job.run.dir == tmp_path / "run"
    state = trained.model.state_dict()
    assert made.state_dict().keys() == {name for name in state if contrast or not name.startswith("aggregation.")}
    for name, tensor in with_rows(made.state_dict(), cfg.classes).items():
        assert torch.equal(state[name], tensor), name
    assert trained.model.config.pooling == ("mean" if contrast else "cls")
    assert (trained.job.tokenizer.path / "tokenizer.json").is_file()


@pytest.mark.parametrize("hf_class", [RobertaForMaskedLM, XLMRobertaForMaskedLM])
def test_foreign_folders_compute_the_same_here(tmp_path, hf_class):
    """Folders by transformers itself, in half precision and in shards."""
    torch.manual_seed(0)
    used = tokenizer()
    hf_config = HFRobertaConfig if hf_class is RobertaForMaskedLM else XLMRobertaConfig
    theirs = hf_class(
        hf_config(
            vocab_size=used.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5,
            initializer_range=0.3,
        )
    ).half()  # fmt: skip
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    used.save(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    trained = load_model(tmp_path / "run")
    tokens = tokenize(TEXTS, used, 64)
    real = tokens != 1
    ours, expected = logits(trained.model, tokens)[real], hf_logits(theirs.float(), tokens, 1)[real]
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA does not point to the folder with the real data")
@pytest.mark.parametrize("name", ["roberta", "bert-base-uncased"])
def test_vocabularies_from_elsewhere(tmp_path, name):
    """RoBERTa's byte-level BPE and BERT's WordPiece (padding id 0) with real text."""
    used = load_tokenizer(Path(os.environ["CAPT_DATA"]) / "vocab" / name)
    cfg = RobertaConfig(
        size="custom", layers=2, hidden=32, heads=2, ffn=48, max_positions=64, pad_id=used.special.pad
    ).for_tokenizer(used.vocab_size, used.special.pad)
    made = model(cfg)
    export_encoder("hf", made.state_dict(), cfg, used, tmp_path / "out", CARD)
    with gzip.open(Path(os.environ["CAPT_DATA"]) / "corpus" / "books.valid.txt.gz", "rt", encoding="utf-8") as file:
        texts = [line.strip() for line in islice(file, 400) if line.strip()]
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")(texts, padding=True, truncation=True, return_tensors="pt")
    tokens = tokenize(texts, used, 64)
    assert torch.equal(batch["input_ids"], tokens)
    loaded = RobertaForMaskedLM.from_pretrained(tmp_path / "out")
    real = tokens[:8] != cfg.pad_id
    ours, theirs = logits(made, tokens[:8])[real], hf_logits(loaded, tokens[:8], cfg.pad_id)[real]
    assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()
