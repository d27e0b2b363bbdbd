"""Rerankers against sentence-transformers: the losses of its trainer, and our export in its CrossEncoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

from capt.finetune.rerank.export import command as export
from capt.finetune.rerank.task import RerankTraining
from capt.finetune.text_predictor import load_text_classifier
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from tests.finetune import sentence, write_encoder
from tests.rerank import ragged_rows, write_rows
from tests.support import run_ranks, train_job

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

_STEPS, _BATCH, _LR = 20, 4, 1e-3


def _mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    mapping: dict[str, Any] = {
        "task": {"type": "rerank"},
        "run": {"dir": str(folder / "run"), "tensorboard": False, "threads": 1},
        "data": {"train": str(folder / "pairs.jsonl"), "cache": str(folder / "cache"), "negatives": 32},
        "model": {"init": str(folder / "encoder"), "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": _BATCH},
        "schedule": {"type": "constant", "epochs": None, "max_steps": _STEPS, "warmup_steps": 0, "warmup_ratio": None},
        "optimizer": {"lr": _LR, "betas": [0.9, 0.999], "weight_decay": 0.0, "clip": 0.0, "backend": "torch"},
        "engine": {"zero_stage": 0, "precision": "fp32"},
    }
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value}
    return mapping


def _ours(mapping: dict[str, Any], folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run, and the weights of the head that it began with."""
    task = RerankTraining(job_from_mapping(mapping, "test"), folder / "run")
    module = task.build_modules()["model"].train()
    head = {name: x.clone() for name, x in module.state_dict().items() if not name.startswith("encoder.")}
    engine = LocalEngine("model", module, task.job, ModuleOptimizer(task.job.optimizer))
    engine.set_learning_rate(_LR)
    progress, losses = Progress(), []
    for batch in task.build_batches(progress):
        losses.append(float(task.step({"model": engine}, batch, progress)["loss"]))  # type: ignore[arg-type]
        progress.step += 1
    return losses, head


def _trainers(kind: str, folder: Path, rows: list[dict[str, Any]], head: dict[str, torch.Tensor]) -> list[float]:
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder import losses as their

    model = CrossEncoder(str(folder / "encoder"), num_labels=1, device="cpu", max_length=64)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    own = model.model.state_dict()
    for mine, theirs in (("dense", "classifier.dense"), ("out", "classifier.out_proj")):
        for part in ("weight", "bias"):
            own[f"{theirs}.{part}"].copy_(head[f"{mine}.{part}"])
    if kind == "infonce":
        # The softmax of such labels is 1 at the positive: the lists' cross-entropy is InfoNCE.
        lists = [{"query": row["query"], "docs": [*row["pos"], *row["neg"]], "labels": [1e4] + [0.0] * len(row["neg"])}
                 for row in rows]  # fmt: skip
        loss: Any = their.ListNetLoss(model, activation_fn=torch.nn.Identity())
        size = _BATCH
    else:
        lists = [
            {"query": row["query"], "doc": text, "label": label if kind == "bce" else score}
            for row in rows
            for text, label, score in zip(
                [*row["pos"], *row["neg"]], [1.0] + [0.0] * len(row["neg"]),
                [*row["pos_scores"], *row["neg_scores"]], strict=True,
            )
        ]  # fmt: skip
        size = _BATCH * (1 + len(rows[0]["neg"]))
        loss = their.BinaryCrossEntropyLoss(model) if kind == "bce" else their.MSELoss(model)
    found: list[float] = []

    class InOrder(CrossEncoderTrainer):
        def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
            return torch.utils.data.BatchSampler(SequentialSampler(dataset), batch_size, drop_last)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            value = super().compute_loss(*args, **kwargs)
            found.append(float(value.detach()))
            return value

    arguments = CrossEncoderTrainingArguments(
        output_dir=str(folder / "theirs"), use_cpu=True, per_device_train_batch_size=size, max_steps=_STEPS,
        learning_rate=_LR, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-6, weight_decay=0.0, max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    InOrder(model=model, args=arguments, train_dataset=Dataset.from_list(lists), loss=loss).train()
    return found


@pytest.mark.parametrize(("kind", "tokens"), [("infonce", 100_000), ("infonce", 200), ("bce", 600), ("mse", 600)])
def test_losses_are_those_of_its_trainer(kind: str, tokens: int, tmp_path: Path) -> None:
    """Lists of 6, or ragged ones; in one pass, in several, and in two passes of a step."""
    rows = ragged_rows(_STEPS * _BATCH, 5)
    if kind != "infonce":  # a mean over pairs is one over queries where their lists are as long
        rows = [{**row, "neg": [f"{row['neg'][0]} {i}" for i in range(5)], "neg_scores": [0.5 * i for i in range(5)]}
                for row in rows]  # fmt: skip
    write_rows(tmp_path / "pairs.jsonl", rows)
    write_encoder(tmp_path / "encoder")
    mapping = _mapping(
        tmp_path, data={"validation_fraction": 0.0, "shuffle": False}, batch={"micro_tokens": tokens},
        loss={"type": kind}, checkpoint={"best": None}, validate={"per_epoch": None, "every": 0},
    )  # fmt: skip
    ours, head = _ours(mapping, tmp_path)
    theirs = _trainers(kind, tmp_path, rows, head)
    assert len(ours) == len(theirs) == _STEPS
    assert max(ours) - min(ours) > 0.02, "the model must move for this to mean anything"
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_cross_encoder_gives_our_scores_for_pairs_of_every_length(
    cls: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Token types, or a head with a LayerNorm; the code of the card runs as it is."""
    from sentence_transformers import CrossEncoder

    write_rows(tmp_path / "pairs.jsonl", ragged_rows(30, 5))
    write_encoder(tmp_path / "encoder", cls)
    mapping = _mapping(tmp_path, schedule={"max_steps": 3}, validate={"per_epoch": 1})
    assert run_ranks(train_job, 1, mapping) == [0]
    out = export(tmp_path / "run", tmp_path / "out", to="hf")
    generator = random.Random(3)
    texts = [" ".join(sentence(generator, n) for _ in range(3)) for n in (3, 4, 9, 30, 40, 60)]
    pairs = [(query, document) for query in texts for document in texts]
    queries, documents = map(list, zip(*pairs, strict=True))
    logits, cut = load_text_classifier(tmp_path / "run").logits(queries, documents)
    assert 0 < cut < len(pairs)
    model = CrossEncoder(str(out), device="cpu")
    np.testing.assert_allclose(model.predict(pairs), logits[:, 0], atol=1e-5)
    assert logits.std() > 1e-3
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("PATH", str(out)), {})
    if cls == "BertForMaskedLM":
        pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
        with caplog.at_level("INFO"):
            graphs = export(tmp_path / "run", tmp_path / "graphs", to="onnx", quantize="int8")
        assert "int8: logits differ by" in caplog.text
        assert "the order of two is the same for" in caplog.text
        assert (graphs / "model_int8.onnx").is_file()
