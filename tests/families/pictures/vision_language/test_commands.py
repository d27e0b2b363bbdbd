"""Uses of a checkpoint of ``capt_vl``: it is loaded, evaluated, written for transformers and described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrast.metrics import noise_invariance
from capt.pretrain.contrastive.metrics import contrast_metrics
from capt.pretrain.engine.evaluations import sections_of
from capt.pretrain.engine.run import run_job
from capt.pretrain.regions.picture import Labels
from capt.pretrain.regions.writer import write_store
from capt.pretrain.vision_language.batches import MaskingVocabulary, VisionLanguageAssembler
from capt.pretrain.vision_language.evaluate import as_text, command, evaluate
from capt.pretrain.vision_language.export import command as export
from capt.pretrain.vision_language.load import load_model, read_answers
from capt.pretrain.vision_language.prepare import prepare
from tests.support import run_ranks
from tests.vision_language import make_pictures, vision_language_mapping, write_sentences, write_small_store

WITHOUT = {"contrast": {"weight": 0.0}, "objectives": {"answers": 0.0}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mapping_of(folder: Path, name: str) -> dict[str, Any]:
    mapping = vision_language_mapping(folder, **(WITHOUT if name == "lxmert" else {}))
    mapping["run"]["dir"] = str(folder / name)
    return mapping


def train_both(folder: Path) -> None:
    for name in ("capt", "lxmert"):
        run_job(job_from_mapping(mapping_of(folder, name), "test"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs: ``capt`` with contrast and answers, ``lxmert`` without either."""
    folder = tmp_path_factory.mktemp("commands")
    vision_language_mapping(folder)
    run_ranks(train_both, 1, folder)
    return folder


def test_a_checkpoint_needs_nothing_beside_itself(home: Path) -> None:
    trained = load_model(home / "capt")
    assert not trained.module.training
    assert trained.checkpoint.name == "step-00000006"
    config, answers = trained.model.config, trained.answers
    assert answers is not None
    assert (config.answers, config.feature_size, config.object_classes) == (len(answers), 11, 7)
    assert list(answers) == json.loads((trained.checkpoint / "answers.json").read_text())
    assert trained.model.aggregation is not None
    bare = load_model(home / "lxmert/checkpoints/step-00000003")
    assert (bare.answers, bare.model.answer_head, bare.model.aggregation) == (None, None, None)


def test_the_answers_must_be_those_of_the_head(home: Path, tmp_path: Path) -> None:
    assert read_answers(home, 0) is None
    with pytest.raises(CheckpointError, match=r"answers\.json: missing: the model has an answer head of 3 classes"):
        read_answers(tmp_path, 3)
    (tmp_path / "answers.json").write_text('["yes", "no"]')
    with pytest.raises(CheckpointError, match="2 answers for an answer head of 3 classes"):
        read_answers(tmp_path, 3)
    (tmp_path / "answers.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a text"):
        read_answers(tmp_path, 3)


def test_evaluation_measures_what_validation_does(home: Path) -> None:
    """Losses, accuracies and contrast against the model's own forward pass on the same batch, without `validate`."""
    result = evaluate(home / "capt", samples=16, batch=16, seed=0)
    (section,) = result["sections"]
    metrics = section["metrics"]
    trained = load_model(home / "capt")
    job = trained.job
    prepared = prepare(job)
    assert prepared.validation is not None
    assembler = VisionLanguageAssembler(
        prepared.validation, prepared.store, MaskingVocabulary.of(trained.tokenizer), job.objectives, job.contrast,
        length=job.data.sequence_length, seed=0, stream="pairs/evaluation",
    )  # fmt: skip
    import numpy as np

    batch = assembler(np.arange(16))
    with torch.no_grad():
        out = trained.module(batch, step=0).lxmert
        encoder, present = trained.model.encoder, batch.present if batch.missing else None
        views = [
            encoder.first(tokens, features.float(), batch.boxes, padded=batch.padded, present=present)
            for tokens, features in (
                (batch.tokens, batch.features), (batch.corrupted, batch.corrupted_features())
            )
        ]  # fmt: skip
    assert metrics["loss/mlm"] == pytest.approx(float(out.mlm.loss_sum) / len(batch.labels), rel=1e-6)
    matching = torch.nn.functional.cross_entropy(out.matching, batch.matched)
    assert metrics["loss/matching"] == pytest.approx(float(matching), rel=1e-6)
    right = (out.matching.argmax(1) == batch.matched).float().mean()
    assert metrics["accuracy/matching"] == pytest.approx(float(right))
    contrast = contrast_metrics(out.s, out.s_hat, 0.05)
    assert metrics["loss/capt_fixed"] == pytest.approx(contrast["loss/capt_fixed"])
    noise = noise_invariance(*views)
    assert {key: metrics[f"noise/cls/{key}"] for key in noise} == pytest.approx(noise)
    assert "16 of 40 pairs, seed 0, 15% of words and 15% of regions masked, 50% mismatched" in section["protocol"]


def test_batch_size_changes_nothing_and_a_seed_does(home: Path) -> None:
    one, other, third = (
        evaluate(home / "lxmert", samples=20, batch=batch, seed=seed)["sections"][0]["metrics"]
        for batch, seed in ((20, 1), (7, 1), (20, 2))
    )
    assert other == pytest.approx(one, rel=1e-5)
    assert third["loss/mlm"] != pytest.approx(one["loss/mlm"], rel=1e-5)
    assert "loss/capt_fixed" not in one
    assert one.keys() >= {"loss/matching", "loss/objects", "loss/features", "noise/cls/drift"}


def test_other_files_and_stores(home: Path, tmp_path: Path) -> None:
    """Without labels or answers their losses are left out, and features of another kind are refused."""
    text = write_sentences(tmp_path / "other.json", 0, 10)
    rows = [{**row, "labelf": {"vqa": [{}, {}]}} for row in json.loads(text.read_text())]
    text.write_text(json.dumps(rows))
    result = command(home / "capt", data=[text], out=tmp_path / "figures.json", samples=8)
    metrics = json.loads((tmp_path / "figures.json").read_text())["sections"][0]["metrics"]
    assert metrics == pytest.approx(result["sections"][0]["metrics"])
    assert "loss/answers" not in metrics
    assert "other.json" in as_text(result)
    stored = [section.name for section in sections_of(load_model(home / "capt").checkpoint)]
    assert stored == ["other.json"]
    with pytest.raises(CheckpointError, match=r"than .* was trained on \(seed is 1 and 0\).*made in the same way$"):
        evaluate(home / "capt", data=[text], regions=write_small_store(tmp_path / "store", 10, seed=1))
    wide = (p._replace(objects=Labels(p.objects.ids + 5, p.objects.scores)) for p in make_pictures(40) if p.objects)
    write_store(tmp_path / "wide", wide, feature_dtype="fp32", features_of={"backend": "test", "seed": 0})
    with pytest.raises(DataError, match=r"wide: object classes 0 to 11, and the model tells 7 apart"):
        evaluate(home / "capt", data=[text], regions=tmp_path / "wide")
    with pytest.raises(DataError, match="nowhere"):
        evaluate(home / "capt", data=[tmp_path / "nowhere.json"])


def test_a_run_without_validation_needs_files(home: Path) -> None:
    trained = load_model(home / "lxmert")
    data = trained.job.data.model_copy(update={"validation": []})
    object.__setattr__(trained, "job", trained.job.model_copy(update={"data": data}))
    with pytest.raises(ConfigError, match="give --data FILE"):
        evaluate(trained)


def test_a_store_that_has_moved_has_a_remedy(home: Path, tmp_path: Path) -> None:
    trained = load_model(home / "lxmert")
    data = trained.job.data.model_copy(update={"regions": tmp_path / "gone"})
    object.__setattr__(trained, "job", trained.job.model_copy(update={"data": data}))
    with pytest.raises(DataError, match=r"gone is not there, as seen from .*: -o regions=STORE"):
        evaluate(trained)


def test_an_export_is_a_stock_model_with_answers_and_a_card(home: Path, tmp_path: Path) -> None:
    """`export_lxmert` compares every logit with ours; here: what it is given."""
    out = export(home / "capt", tmp_path / "out", to="hf")
    config = json.loads((out / "config.json").read_text())
    answers = load_model(home / "capt").answers
    assert answers is not None
    assert config["architectures"] == ["LxmertForPreTraining"]
    assert config["id2label"] == {str(number): answer for number, answer in enumerate(answers)}
    assert (out / "capt_head.safetensors").exists()
    card = (out / "README.md").read_text()
    assert "with question answering, and CAPT" in card
    assert "| features: backend | test |" in card
    assert "| pairs seen | 48 |" in card
    assert "synthetic" not in card
    assert str(home) not in card, "paths are shown by their last part"
    bare = export(home / "lxmert", tmp_path / "bare", to="hf")
    assert "without question answering." in (bare / "README.md").read_text()
    assert not (bare / "capt_head.safetensors").exists()
