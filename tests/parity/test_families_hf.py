"""Encoders of other families: read, continued with MLM and CAPT, evaluated, and given back as stock classes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.language.evaluate import as_text, command, evaluate
from capt.pretrain.language.export import command as export
from capt.pretrain.language.import_hf import command as import_hf
from capt.pretrain.language.load import load_hf, load_model
from capt.pretrain.language.prepare import prepare
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.hf_map import renamed
from capt.pretrain.plan.step import rank_step
from tests.finetune import sentence, write_encoder
from tests.language import language_mapping
from tests.support import run_ranks, stopped_at, train_job

_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0, "position_buckets": 16}
SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForPreTraining", {}, "BertForMaskedLM"),
    "minilm": ("BertModel", {}, "BertForMaskedLM"),
    "camembert": ("CamembertForMaskedLM", {}, "CamembertForMaskedLM"),
    "mpnet": ("MPNetForMaskedLM", {}, "MPNetForMaskedLM"),
    "generator": ("ElectraForMaskedLM", {"embedding_size": 16}, "ElectraForMaskedLM"),
    "discriminator": ("ElectraForPreTraining", {"embedding_size": 32}, "ElectraForMaskedLM"),
    "distilbert": (
        "DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}, "DistilBertForMaskedLM",
    ),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 16, "hidden_act": "gelu_new"}, "AlbertForMaskedLM"),
    "deberta": ("DebertaV2ForMaskedLM", _DEBERTA, "DebertaV2ForMaskedLM"),
}  # fmt: skip
"""The class and the keys of a source, and the class that it is exported as."""
HEADLESS = ("minilm", "discriminator")
RESUMED = ("minilm", "mpnet")
"""Continued on two ranks, interrupted between."""


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder that transformers wrote: a small model with large random weights, so that a difference shows."""
    cls, changes, _ = SOURCES[request.param]
    folder = write_encoder(tmp_path_factory.mktemp(request.param) / "hf", cls, initializer_range=0.3, **changes)
    return request.param, folder


def _batch(vocabulary: int, pad: int) -> torch.Tensor:
    tokens = torch.randint(5, vocabulary, (3, 17), generator=torch.Generator().manual_seed(0))
    tokens[1, 11:] = pad
    return tokens


@torch.no_grad()
def _difference(folder: Path, cls: str, model: CaptModel) -> float:
    """The largest difference of our hidden states, or logits, from those of a stock class loaded from ``folder``."""
    theirs = getattr(transformers, cls).from_pretrained(folder).eval()
    tokens = _batch(model.encoder.vocab_size, model.encoder.pad_id)
    real = tokens != model.encoder.pad_id
    given = {"input_ids": tokens, "attention_mask": real.long()}
    hidden = model.encode(tokens, padded=True)
    if cls.endswith("Model"):
        return float((hidden - theirs(**given).last_hidden_state)[real].abs().max())
    return float((model.mlm.logits(hidden) - theirs(**given).logits)[real].abs().max())


def _continued(folder: Path, init: Path, **changes: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    if not text.exists():
        generator = random.Random(1)
        text.write_text("\n\n".join(" ".join(sentence(generator) for _ in range(4)) for _ in range(80)))
    settings = {"schedule": {"max_steps": 2, "warmup_steps": 1}, "checkpoint": {"every": 1}, "optimizer": {"lr": 3e-4}}
    mapping = language_mapping(folder, **{**settings, **changes})
    return {**mapping, "model": {"init": str(init), "dropout": 0.0, "attention_dropout": 0.0}, "tokenizer": {}}


def test_a_source_is_read_exactly(source: tuple[str, Path]) -> None:
    name, folder = source
    trained = load_hf(folder)
    assert trained.has_mlm == (name not in HEADLESS)
    encoder = trained.model.config.hf.encoder
    assert _difference(folder, encoder, trained.model) < 1e-5
    if trained.has_mlm:
        assert _difference(folder, SOURCES[name][2], trained.model) < 5e-5  # logits of tens


def test_it_is_continued_evaluated_and_given_back(source: tuple[str, Path], tmp_path: Path) -> None:
    """Each export compares itself with transformers, and refuses a difference above 1e-5."""
    name, folder = source
    job = _continued(tmp_path, folder)
    ranks = 2 if name in RESUMED else 1
    if ranks == 2:
        stopped = stopped_at(job, 1)
        assert run_ranks(train_job, 2, stopped, False) == [75, 75]
    assert run_ranks(train_job, ranks, job, ranks == 2) == [0] * ranks
    run = tmp_path / "run"
    before, after = load_hf(folder).model, load_model(run).model
    assert after.config.arch == before.config.arch
    weights = after.encoder.state_dict()
    moved = [key for key, x in before.encoder.state_dict().items() if not torch.equal(x, weights[key])]
    assert any("word" in key for key in moved)
    assert len(moved) > 10

    out = export(run, tmp_path / "out", to="hf")
    stock = transformers.AutoModelForMaskedLM.from_pretrained(out)
    assert type(stock).__name__ == SOURCES[name][2]
    import_hf(out, tmp_path / "again")
    again = load_model(tmp_path / "again").model
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in after.state_dict().items())
    if name == "albert" or name in RESUMED:  # whose poolers have different names
        export(run, tmp_path / "st", to="sentence-transformers", pooling="mean")
    if name in RESUMED:
        found = command(run, text=[tmp_path / "text.txt"], samples=4, pooler=["mean"], before=True)
        assert len(found["before"]) == len(found["sections"])
        assert "what the run has changed" in as_text(found)
        whole = {**job, "run": {**job["run"], "dir": str(tmp_path / "whole")}}
        assert run_ranks(train_job, 2, whole, False) == [0, 0]
        straight = load_model(tmp_path / "whole").model.state_dict()
        assert all(torch.equal(x, straight[key]) for key, x in after.state_dict().items())


def _edited(folder: Path, out: Path, keys: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A copy of ``folder`` with other keys in its ``config.json``, and tensors beside its own."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **keys}))
    save_file({**load_file(out / "model.safetensors"), **(tensors or {})}, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'; a BERT encoder has 'gelu'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but the tensors have 2"),
        ({"max_position_embeddings": 63}, "its tensors have other shapes: encoder.embeddings.position"),
        ({"type_vocab_size": 3}, "its tensors have other shapes: encoder.embeddings.token_type"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ],
)
def test_a_bert_that_is_not_ours_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf", "BertForMaskedLM")
    with pytest.raises(CheckpointError, match=message):
        load_hf(_edited(folder, tmp_path / "edited", keys))


def test_names_without_a_layer_are_not_said_to_be_a_wrong_size(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf", "BertForMaskedLM")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"student.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hf: no tensor has the name of a layer of BERT; .* are student\.bert"):
        load_hf(folder)


def test_a_family_on_transformers_that_lies_about_its_sizes_is_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf", "DebertaV2ForMaskedLM", **_DEBERTA)
    with pytest.raises(CheckpointError, match="its tensors have other shapes: encoder"):
        load_hf(_edited(folder, tmp_path / "edited", {"position_buckets": 2**20}))
    with pytest.raises(CheckpointError, match="does not have the tensors of this DeBERTa-v2: missing"):
        load_hf(_edited(folder, tmp_path / "deeper", {"num_hidden_layers": 4}))


def test_names_of_the_authors_and_of_old_releases_are_read(tmp_path: Path) -> None:
    """DeBERTa-v3's language-model head, and the LayerNorms of bert-base-uncased."""
    deberta = write_encoder(tmp_path / "deberta", "DebertaV2ForMaskedLM", **_DEBERTA)
    bert = write_encoder(tmp_path / "bert", "BertForMaskedLM")
    for folder, names in (
        (
            deberta,
            {"cls.predictions.transform.": "cls.predictions.", "cls.predictions.": "lm_predictions.lm_head."},
        ),
        (bert, {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}),
    ):
        before = load_hf(folder).model.state_dict()
        tensors = {renamed(name, names): x for name, x in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors")
        trained = load_hf(folder)
        assert trained.has_mlm
        assert all(torch.equal(x, trained.model.state_dict()[name]) for name, x in before.items())


def test_documents_apart_are_refused_once_the_family_is_known(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf", "MPNetForMaskedLM")
    job = _continued(tmp_path, folder)
    job["data"]["cross_document_attention"] = False
    with pytest.raises(ConfigError, match=r"model\.arch mpnet cannot keep attention inside documents"):
        prepare(job_from_mapping(job, "test"))


@pytest.mark.parametrize("cls", ["BertModel", "MPNetForMaskedLM"])
def test_a_job_that_starts_from_it_is_planned(cls: str, tmp_path: Path) -> None:
    """With the layers of the folder, of which there are more than are simulated."""
    folder = write_encoder(tmp_path / "hf", cls, num_hidden_layers=5)
    job: Any = job_from_mapping(_continued(tmp_path, folder), "test")
    model = CaptModel(load_hf(folder).model.config)
    assert rank_step(job, 1, gpu=False).weights == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.realdata
def test_a_public_sentence_encoder_has_its_published_similarity(sentence_encoder: Path, data_folder: Path) -> None:
    """all-MiniLM-L6-v2 has 82.0 on STS-B test by its authors' pooling; so the protocol is the usual one."""
    assert _difference(sentence_encoder, "BertModel", load_hf(sentence_encoder).model) < 1e-5
    found = evaluate(
        load_hf(sentence_encoder), sts=data_folder / "glue" / "STS-B" / "original", poolers=["mean"], batch=64
    )["sections"]
    assert found[0]["poolers"]["mean"]["spearman"] == pytest.approx(0.8203, abs=5e-4)
