"""Twenty steps on pairs give the losses of sentence-transformers: same weights, data and order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.pairs.task import PairTask
from tests.pairs import pairs_mapping, write_pairs

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

_STEPS, _LR = 20, 1e-3


def _ours(mapping: dict[str, Any], folder: Path) -> tuple[list[float], list[list[int]]]:
    """The loss of each step, and the rows that it used."""
    task = PairTask(job_from_mapping(mapping, "test"), folder / "run")
    engine = LocalEngine("model", task.build_modules()["model"].train(), task.job, ModuleOptimizer(task.job.optimizer))
    engine.set_learning_rate(_LR)
    progress, losses, used = Progress(), [], []
    for batch in task.build_batches(progress):
        used.append([int(i) for part in batch for i in part.ids])
        losses.append(float(task.step({"model": engine}, batch, progress)["loss"]))
        progress.step += 1
    return losses, used


def _theirs(folder: Path, rows: list[dict[str, Any]], used: list[list[int]], negatives: int, kind: str) -> list[float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules

    transformer = modules.Transformer(str(folder / "encoder"), max_seq_length=24)
    model = SentenceTransformer(modules=[transformer, modules.Pooling(32, "mean"), modules.Normalize()], device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if kind == "cosent":
        loss: Any = losses.CoSENTLoss(model, scale=20.0)
    elif kind == "cosine":
        loss = losses.CosineSimilarityLoss(model)
    elif kind == "cached":
        loss = losses.CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=4)
    else:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = losses.MultipleNegativesRankingLoss(model, scale=20.0, **(both if kind == "symmetric" else {}))
    if kind == "matryoshka":
        loss = losses.MatryoshkaLoss(model, loss, [32, 16, 8])
    optimizer = torch.optim.AdamW(model.parameters(), _LR, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    model.train()
    found = []
    for ids in used:
        chosen = [rows[i] for i in ids]
        scores = torch.tensor([row.get("score", 0.0) for row in chosen])
        columns = [[row["query"] for row in chosen], [row["pos"][0] for row in chosen]]
        columns += [[row["neg"][i] for row in chosen] for i in range(negatives)]
        value = loss([model.preprocess(column) for column in columns], scores)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


@pytest.mark.parametrize(
    ("kind", "negatives", "micro", "contrast"),
    [
        ("plain", 0, 8, {}),
        ("plain", 1, 8, {}),
        ("cached", 1, 2, {}),
        ("symmetric", 1, 4, {"directions": "symmetric"}),
        ("matryoshka", 1, 4, {"matryoshka": [32, 16, 8]}),
        ("cosent", 0, 4, {}),
        ("cosine", 0, 4, {}),
    ],
)
def test_losses_are_theirs(tmp_path: Path, kind: str, negatives: int, micro: int, contrast: dict[str, Any]) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 40, negatives=negatives)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    loss = {"loss": kind} if kind in ("cosent", "cosine") else {}
    if loss:
        rows = [{**row, "score": number % 6 / 5} for number, row in enumerate(rows)]
        keep = ("query", "pos", "score")
        lines = [json.dumps({key: row[key] for key in keep}) for row in rows]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    mapping = pairs_mapping(
        tmp_path,
        data={"validation_fraction": 0.0, "negatives": negatives, **loss},
        batch={"global": 8, "micro": micro},
        contrast=contrast,
        schedule={"max_steps": _STEPS},
        optimizer={"lr": _LR, "weight_decay": 0.0, "clip": 0.0, "backend": "torch"},
    )
    ours, used = _ours(mapping, tmp_path)
    theirs = _theirs(tmp_path, rows, used, negatives, kind)
    assert len(ours) == _STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0]
