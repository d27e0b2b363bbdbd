"""``capt evaluate`` on tiny checkpoints: numbers against the model's own forward pass, protocol lines, errors."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn import functional as F

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrastive.metrics import contrast_metrics
from capt.pretrain.data.config import CorruptionConfig
from capt.pretrain.data.corruption import Corruptor
from capt.pretrain.data.prepare import prepare
from capt.pretrain.data.shards import PackedDataset
from capt.pretrain.data.sts_files import Pairs, find_sets
from capt.pretrain.engine.checkpoint.save import partial_folder, write_weights_only
from capt.pretrain.engine.evaluations import sections_of
from capt.pretrain.language import evaluate as module
from capt.pretrain.language.batches import LanguageAssembler
from capt.pretrain.language.evaluate import Representations, as_text, command, evaluate
from capt.pretrain.language.load import load_backbone, load_model
from capt.pretrain.language.module import LanguageModule
from capt.pretrain.language.prepare import vocabulary_of
from capt.pretrain.language.sts import score, word_figures
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.train import train
from tests.support import run_ranks

LENGTH = 24
WORDS = [
    "tree",
    "river",
    "stone",
    "cloud",
    "bird",
    "walks",
    "sings",
    "falls",
    "over",
    "under",
    "the",
    "a",
    "old",
    "blue",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that outnumber free cores make tiny matrix products many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, STS files, and two random checkpoints: ``capt`` with a head, ``mlm`` without."""
    home = tmp_path_factory.mktemp("evaluate")
    (home / "text.txt").write_text("\n\n".join("\n".join(sentences(8, seed)) for seed in range(12)) + "\n")
    rows = [
        f"{i}\t{a}\t{b}\t{i % 6}" for i, (a, b) in enumerate(zip(sentences(40, 98), sentences(40, 99), strict=True))
    ]
    (home / "sts").mkdir()
    (home / "sts/dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "\n".join(rows) + "\n")
    train(sentences(400, 1), home / "tokenizer", vocab_size=120, type="bpe", byte_fallback=False)
    for name, weight in (("capt", 1.0), ("mlm", 0.0)):
        write_checkpoint(home, name, weight)
    return home


def test_a_run_means_its_best_checkpoint(home: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        shutil.copytree(load_model(home / "capt").checkpoint, checkpoints / f"step-{step:08d}")
    assert load_model(tmp_path).checkpoint.name == "step-00000002"
    (checkpoints / "best").symlink_to("step-00000001")
    assert load_model(tmp_path).checkpoint.name == "step-00000001"


def test_the_encoder_of_a_checkpoint_is_hashed_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load_backbone(home / "capt")
    hashed = [message for message in caplog.messages if message.startswith("hashing")]
    assert len([message for message in hashed if not message.startswith("hashing 1 file")]) == 1, hashed


def write_checkpoint(home: Path, name: str, weight: float) -> None:
    job = job_from_mapping(
        {
            "task": {"type": "capt_language"},
            "run": {"dir": str(home / name)},
            "data": {"files": [str(home / "text.txt")], "sequence_length": LENGTH, "cache": str(home / "cache")},
            "model": {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "max_positions": 40},
            "contrast": {"weight": weight, "queue": 0},
        },
        name,
    )
    tokenizer = load_tokenizer(home / "tokenizer")
    torch.manual_seed(0)
    built = LanguageModule(job, job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad))
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # far from the initial near-collapse, so that rankings are distinct
    target = home / name / "checkpoints/step-00000001"
    tokenizer.save(partial_folder(target) / "tokenizer")
    write_weights_only(target, job, {"model": built}, {})


@pytest.fixture(scope="module")
def result(home: Path) -> dict:
    return evaluate(home / "capt", text=[home / "text.txt"], sts=home / "sts", out=home / "out/result.json", batch=16)


def test_sections_and_file(home: Path, result: dict) -> None:
    assert json.loads((home / "out/result.json").read_text()) == result
    assert result["checkpoint"] == str(home / "capt/checkpoints/step-00000001")
    assert [section["name"] for section in result["sections"]] == [
        "text.txt, 15% masked",
        "text.txt, 30% masked",
        "STS-B dev",
    ]
    contrast = {
        "loss/capt_fixed", "retrieval/to_corrupted", "retrieval/to_original", "alignment", "uniformity",
        "first_direction",
    }  # fmt: skip
    for section in result["sections"][:2]:
        assert set(section["metrics"]) == {"loss/mlm", "accuracy/mlm"}
        assert list(section["poolers"]) == ["cls", "mean", "head"]
        for values in section["poolers"].values():
            assert set(values) == contrast | {"cosine_gap", "centred_gap", "drift", "top1"}
    low, high = (section["poolers"]["mean"]["drift"] for section in result["sections"][:2])
    assert 0 < low < high


def test_every_number_stands_under_its_protocol_line(result: dict) -> None:
    text = as_text(result)
    for section in result["sections"]:
        assert text.index(section["name"]) < text.index(section["protocol"])
        for part in ("cls = final hidden state of <s>, head not used", "float32 on ", "torch 2.", "transformers 5."):
            assert part in section["protocol"]
    masked, _, sts = (section["protocol"] for section in result["sections"])
    for part in ("windows of 24 tokens", "seed 1", "mask_tokens 15%", "temperature 0.05", "across documents"):
        assert part in masked
    for part in ("Spearman of cosine over all 40 pairs together", "max length 40 tokens", "no prompt"):
        assert part in sts
    spearman = result["sections"][2]["poolers"]["head"]["spearman"]
    assert f"{spearman:>12.4g}" in next(line for line in text.splitlines() if line.strip().startswith("spearman "))
    assert set(result["sections"][2]["metrics"]) == {"spearman/tf-idf", "spearman/word-counts"}


def test_words_are_counted_by_the_definition() -> None:
    first = ["A cat sat", "the dog ran", "a bird", "no, no"]
    second = ["a cat ran", "The dog", "one fish", "a no"]
    gold = np.array([4.0, 3.0, 0.0, 1.0])
    words = [re.findall(r"\w+", text.lower()) for text in (*first, *second)]
    containing = {word: sum(word in each for each in words) for each in words for word in each}

    def rho(weight: Callable[[str], float]) -> float:
        rows = [{word: each.count(word) * weight(word) for word in each} for each in words]
        norms = [math.sqrt(sum(value**2 for value in row.values())) for row in rows]
        cosines = [
            sum(value * rows[i + 4].get(word, 0.0) for word, value in rows[i].items()) / (norms[i] * norms[i + 4])
            for i in range(4)
        ]
        return float(spearmanr(cosines, gold).statistic)

    figures = word_figures(Pairs("toy", "test", first, second, gold))
    assert figures["spearman/tf-idf"] == pytest.approx(rho(lambda word: math.log(9 / (1 + containing[word])) + 1))
    assert figures["spearman/word-counts"] == pytest.approx(rho(lambda word: 1.0))


def test_numbers_are_those_of_the_models_own_forward_pass(home: Path, result: dict) -> None:
    trained = load_model(home / "capt")
    job, tokenizer = trained.job, trained.tokenizer
    data = job.data.model_copy(update={"validation_fraction": 0.0})
    shards = prepare(data, tokenizer, "train")
    assert shards is not None
    windows = PackedDataset(shards, LENGTH)
    corruptor = Corruptor(CorruptionConfig(rate=0.15), vocabulary_of(tokenizer), LENGTH)
    assembler = LanguageAssembler(
        windows,
        corruptor,
        seed=1,
        stream="corruption/evaluation",
        shuffle=True,
        pad_id=1,
        cross_document_attention=True,
    )
    batch = assembler(np.arange(len(windows)))
    assert batch.padded
    with torch.no_grad():
        out = trained.model(batch.tokens, batch.corrupted, batch.positions, batch.labels, None, batch.padded)
    section = result["sections"][0]
    assert section["metrics"]["loss/mlm"] == pytest.approx(float(out.mlm_loss_sum / out.mlm_count), rel=1e-5)
    assert section["metrics"]["accuracy/mlm"] == pytest.approx(float(out.mlm_correct / out.mlm_count), rel=1e-6)
    for name, value in contrast_metrics(out.s, out.s_hat, module.TEMPERATURE).items():
        assert section["poolers"]["head"][name] == pytest.approx(value, rel=1e-5), name


def test_batch_size_and_ranks_change_nothing(home: Path, result: dict) -> None:
    again = evaluate(home / "capt", text=[home / "text.txt"], sts=home / "sts", batch=5)
    assert_same(again, result)
    for found in run_ranks(_evaluate_on_rank, 2, home):
        assert_same(found, result)


def _evaluate_on_rank(home: Path) -> dict:
    return evaluate(home / "capt", text=[home / "text.txt"], sts=home / "sts", batch=16)


def assert_same(found: dict, expected: dict) -> None:
    for section, other in zip(found["sections"], expected["sections"], strict=True):
        assert section["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
        for pooler, values in other["poolers"].items():
            assert section["poolers"][pooler] == pytest.approx(values, rel=1e-4, abs=1e-5)


def test_seed_length_and_samples_take_effect_and_are_said(home: Path, result: dict) -> None:
    other = evaluate(home / "capt", text=[home / "text.txt"], poolers=["mean"], seed=2, length=16, samples=10)
    section = other["sections"][0]
    assert "10 of " in section["protocol"]
    assert "windows of 16 tokens, seed 2" in section["protocol"]
    assert section["metrics"]["loss/mlm"] != result["sections"][0]["metrics"]["loss/mlm"]
    assert list(section["poolers"]) == ["mean"]
    assert "head = " not in section["protocol"]


def test_a_checkpoint_without_head_is_compared_on_the_encoder(home: Path) -> None:
    found = evaluate(load_model(home / "mlm"), text=[home / "text.txt"])
    assert list(found["sections"][0]["poolers"]) == ["cls", "mean"]
    with pytest.raises(CheckpointError, match="no aggregation head; use pooler cls or mean"):
        evaluate(home / "mlm", text=[home / "text.txt"], poolers=["head"])


def test_texts_are_encoded_alike_alone_and_in_a_padded_batch(home: Path) -> None:
    trained = load_model(home / "capt")
    model = Representations(trained, ("cls", "mean", "head"))
    texts = ["a bird", *sentences(5, 3), " ".join(WORDS * 10)]
    together = model.encode_texts(texts)
    assert together.shape == (7, 3 * 32)
    for row, text in zip(together, texts, strict=True):
        np.testing.assert_allclose(model.encode_texts([text])[0], row, atol=2e-5)
    head = torch.tensor(together[:, 64:])
    special = trained.tokenizer.special
    ids = torch.tensor([[special.bos, *trained.tokenizer.encode_batch(texts[:1])[0].tolist(), special.eos]])
    with torch.no_grad():
        torch.testing.assert_close(trained.model.embed(ids, False)[0], head[0], atol=2e-5, rtol=0)
    assert torch.allclose(F.normalize(head, dim=1), head, atol=1e-5)


def test_errors_come_before_the_work(home: Path, tmp_path: Path) -> None:
    text = home / "text.txt"
    with pytest.raises(ConfigError, match=r"nothing to evaluate on: .*\(--text\).*\(--sts\).*\(--retrieval\)"):
        evaluate(home / "capt")
    with pytest.raises(DataError, match=r"^--text: .*absent\.txt does not exist"):
        command(home / "capt", text=[tmp_path / "absent.txt"])
    with pytest.raises(ConfigError, match="poolers max: choose from cls, mean, head"):
        evaluate(home / "capt", text=[text], poolers=["max"])
    with pytest.raises(ConfigError, match=r"length 41: this checkpoint takes 8 to 40 tokens"):
        evaluate(home / "capt", text=[text], length=41)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        evaluate(tmp_path, text=[text])
    with pytest.raises(DataError, match="no STS set"):
        evaluate(home / "capt", sts=tmp_path)
    with pytest.raises(DataError, match=r"absent\.txt"):
        evaluate(home / "capt", text=[tmp_path / "absent.txt"])
    (tmp_path / "short.txt").write_text("a bird sings.\n")
    with pytest.raises(DataError, match=r"short\.txt: fills 1 window of 24 tokens"):
        evaluate(home / "capt", text=[tmp_path / "short.txt"])


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA is not set: no real STS-B files")
def test_real_stsb_through_a_checkpoint(home: Path, tmp_path: Path) -> None:
    lines = (Path(os.environ["CAPT_DATA"]) / "glue/STS-B/dev.tsv").read_text(encoding="utf-8").split("\n")[:201]
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (section,) = evaluate(home / "capt", sts=tmp_path, poolers=["mean", "head"])["sections"]
    assert section["poolers"]["mean"]["pairs"] == 200
    model = Representations(load_model(home / "capt"), ("head",))
    alone = score(find_sets(tmp_path)[0], model.encode_texts, batch=7)
    assert section["poolers"]["head"]["spearman"] == pytest.approx(alone["spearman"], abs=1e-6)


def test_the_command_keeps_what_it_measured_in_the_run(home: Path) -> None:
    text, sts = [home / "text.txt"], home / "sts"
    first = command(home / "capt", text=text, pooler=["mean"], samples=16)
    kept = home / "capt" / "evaluation-step-00000001.json"
    assert json.loads(kept.read_text())["sections"] == first["sections"]
    command(home / "capt", sts=sts, pooler=["mean"])
    again = command(home / "capt", text=text, pooler=["mean"], samples=24)
    checkpoint = home / "capt" / "checkpoints" / "step-00000001"
    assert [section.name for section in sections_of(checkpoint)] == [
        "STS-B dev", "text.txt, 15% masked", "text.txt, 30% masked",
    ]  # fmt: skip
    assert sections_of(checkpoint)[1].metrics == again["sections"][0]["metrics"]
    for damaged in ("{", '{"sections": [{"name": 1}]}', "[]"):
        kept.write_text(damaged)
        with pytest.raises(DataError, match=kept.name):
            sections_of(checkpoint)
    kept.unlink()
    assert sections_of(checkpoint) == []
