"""Contract of every task: a stopped run is the uninterrupted one, and any ranks and ZeRO stages learn the same.

A task enters by a row of ``TASKS``: a small job with whatever of the task has a state (dropout, a queue, a schedule of
the masks, a mixture, critics), and what of it depends on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from capt.pretrain.engine.checkpoint import find_checkpoint
from capt.pretrain.reliability.ledger.check import check
from tests.embeddings import small_job as word_job
from tests.embeddings import write_text as write_words_text
from tests.finetune import glue_mapping, sentence, write_encoder, write_task
from tests.language import language_mapping, write_corpus
from tests.latent import small_job as latent_job
from tests.latent import write_text as write_sentences
from tests.pairs import every_text, pairs_mapping, two_sources, write_vectors
from tests.runs import rows_of
from tests.support import run_ranks, stopped_at, train_job, train_seen
from tests.vision_language import vision_language_mapping
from tests.visual import visual_mapping

Mapping = dict[str, Any]
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
RAMP = {"ramp": [[200, 4], [500, 6]]}
"""Two steps of 4 windows of 32 tokens, two of 6, the rest of 8: one micro-batch of 2 on two ranks, then two, one of
them with a window less."""
TIMES = ("second", "own_time", "memory", "time")


def _language(folder: Path, exact: bool) -> Mapping:
    """Masks and batches that change, accumulation, a queue that wraps; a mixture, or layers with rates of their own."""
    if exact:
        masks = {"rate": [[0.2, 0.4], [0.5, 0.3], [0.5, 0.1], [1.0, 0.2]]}
        job = language_mapping(folder, model=DROPOUT, corruption=masks, batch=RAMP)
        other = {"name": "other", "files": [str(write_corpus(folder / "other.txt", 4, 1))], "epochs": 2}
        text = {"name": "text", "files": job["data"].pop("files"), "weight": [[0.2, 0.1], [0.8, 4.0]]}
        job["data"]["mixture"] = [text, other]
        return job
    masks = {"rate": [[0.0, 0.4], [1.0, 0.1]]}
    optimizer = {"lr": 1e-3, "clip": 1.0, "layer_decay": 0.8, "freeze": "embeddings"}
    return language_mapping(folder, model={"initializer_range": 0.1}, optimizer=optimizer, corruption=masks, batch=RAMP)


def _spans(folder: Path, exact: bool) -> Mapping:
    """Neighbouring spans of runs, masked on both sides, short texts among them; a bottleneck where ``exact``."""
    job = _language(folder, exact)
    job["data"] |= {"view": "neighbour", "passage": 60, "apart": 120, "spans": {"least": 4, "gap": 2, "short": "whole"}}
    job["mlm"] = {"views": "both"}
    return {**job, "bottleneck": {"head": "both"}} if exact else job


def _pairs(folder: Path, exact: bool) -> Mapping:
    """Two sources, hard negatives, a queue, micro-batches by length, a projection, validation on the way."""
    model = {**DROPOUT, "projection": 12} if exact else {"projection": 12}
    return pairs_mapping(
        folder, data=two_sources(folder), model=model, contrast={"queue": 24}, validate={"every": 3},
        optimizer={"lr": 1e-3, "clip": 0.0}, engine={"zero_stage": 1, "precision": "fp32"},
    )  # fmt: skip


def _taught(folder: Path, exact: bool) -> Mapping:
    """Pairs and texts alone, all losses of a teacher's vectors, a projection that the export leaves behind."""
    data = two_sources(folder)
    alone = folder / "alone.jsonl"
    texts = every_text(*(Path(file) for source in data["sources"] for file in source["files"]))
    alone.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts[:50]))
    write_vectors(folder / "vectors", texts, 12)
    data["sources"][0] |= {"files": [str(alone)], "loss": "none", "prompts": {}}
    losses = {"cosine": 1.0, "mse": 0.5, "listwise": 0.2, "listwise_temperature": 0.1}
    return pairs_mapping(
        folder, data=data, model=DROPOUT if exact else {}, validate={"every": 3},
        distillation={"vectors": str(folder / "vectors"), **losses},
        optimizer={"lr": 1e-3, "clip": 0.0}, engine={"zero_stage": 1, "precision": "fp32"},
    )  # fmt: skip


def _vision_language(folder: Path, exact: bool) -> Mapping:
    model = DROPOUT if exact else {"initializer_range": 0.1, "layer_norm_eps": 1e-5}
    return vision_language_mapping(folder, model=model, optimizer={"lr": 1e-3, "clip": 1.0})


def _glue(folder: Path, exact: bool) -> Mapping:
    """MNLI with both of its dev sets, in the middle of an epoch."""
    write_encoder(folder / "encoder")
    write_task(folder / "glue", "mnli", train=61, dev=31)
    return glue_mapping(
        folder, "mnli", model=DROPOUT if exact else {}, schedule={"epochs": 1}, validate={"per_epoch": 2},
        checkpoint={"keep": 2}, optimizer={"lr": 1e-3},
    )  # fmt: skip


def _labels(folder: Path, exact: bool) -> Mapping:
    """Texts with one, another or both of two labels; adapters beside a frozen encoder where ``exact``."""
    write_encoder(folder / "encoder", "BertModel")
    generator, labels = random.Random(0), {"Yes": '["first"]', "No": '["second"]', "Perhaps": '["second", "first"]'}
    rows = [(word, f"{word} {sentence(generator, 6)}") for word in generator.choices(list(labels), k=60)]
    text = "".join(f'{{"text": "{text}", "label": {labels[word]}}}\n' for word, text in rows)
    (folder / "train.jsonl").write_text(text)
    job = glue_mapping(folder, model=DROPOUT if exact else {}, schedule={"epochs": 1}, optimizer={"lr": 1e-3})
    if exact:
        pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
        job["model"]["lora"] = {"rank": 4, "dropout": 0.2}
    data = {"train": str(folder / "train.jsonl"), "cache": str(folder / "cache")}
    return {**job, "task": {"type": "labels"}, "data": data, "validate": {"per_epoch": 2}}


def _rerank(folder: Path, exact: bool) -> Mapping:
    """Queries with 1 to 30 negatives: most steps take two passes, those of short lists one."""
    write_encoder(folder / "encoder")
    generator, rows = random.Random(0), []
    for number in range(50):
        query, few = f"{sentence(generator, 4)} {number}", number % 5
        texts = [f"{sentence(generator, 12)} {number} {i}" for i in range(2 if few else 30)]
        rows.append({"query": query, "pos": [f"{query} {sentence(generator, 8)}"], "neg": texts})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = glue_mapping(folder, model=DROPOUT if exact else {}, schedule={"epochs": 1}, optimizer={"lr": 1e-3})
    job["data"] = {"train": str(folder / "pairs.jsonl"), "cache": str(folder / "cache"), "negatives": 30}
    job["batch"] = {"global": 5, "micro_tokens": 250}
    return {**job, "task": {"type": "rerank"}, "validate": {"per_epoch": 2}}


def _visual(folder: Path, exact: bool) -> Mapping:
    """Two pictures a sentence."""
    model = DROPOUT if exact else {}
    settings = {"batch": {"global": 8, "micro": 2}, "schedule": {"epochs": 1}, "optimizer": {"lr": 1e-3}}
    return visual_mapping(folder, "nlvr2", model=model, **settings)


def _latent(folder: Path, exact: bool) -> Mapping:
    """A contrast with a queue of its own, and critics with an optimizer of their own."""
    job = latent_job("clvae_plus_mi", write_sentences(folder), folder / "run", "contrast.queue=24")
    return job.model_dump(mode="json", by_alias=True)


def _words(folder: Path, exact: bool) -> Mapping:
    if not (folder / "text.txt").exists():
        write_words_text(folder / "text.txt", 6000, largest=300)
    return word_job(folder, folder / "run", "optimizer.lr=0.02").model_dump(mode="json", by_alias=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """A task.

    Attributes:
        job: makes the mapping of a small job in a folder; for equality to the last digit, or between ranks.
        tolerance: of losses on other numbers of ranks, relative; critics enlarge what differs.
        parts: ranks, ZeRO stage and last step of each part of a run; a stage of None leaves the job's own.
        accumulates: False where a rank takes its part of a batch in one piece.
    """

    job: Callable[[Path, bool], Mapping]
    tolerance: float
    parts: tuple[tuple[int, int | None, int | None], ...] = ((2, 1, 2), (1, 3, 4), (4, 2, None))
    accumulates: bool = True


TASKS = {
    "capt_language": Row(_language, 1e-5),
    "capt_language, spans": Row(_spans, 1e-5),
    "capt_pairs": Row(_pairs, 1e-4),
    "capt_pairs, a teacher's vectors": Row(_taught, 1e-4, ((2, 0, 2), (1, 3, 4), (4, 2, None))),
    "capt_vl": Row(_vision_language, 1e-5),
    "glue": Row(_glue, 2e-4),
    "labels": Row(_labels, 2e-4),
    "rerank": Row(_rerank, 2e-4),
    "visual": Row(_visual, 2e-4),
    "latent": Row(_latent, 3e-3, ((2, None, 2), (1, None, 4), (4, None, None)), accumulates=False),
    "ace": Row(_words, 1e-6, ((2, None, 2), (1, None, 4), (4, None, None)), accumulates=False),
}

NAMES = [
    pytest.param(name, marks=pytest.mark.family) if name in ("capt_vl", "visual", "latent", "ace") else name
    for name in TASKS
]


def _rows(job: Mapping) -> list[Mapping]:
    """Rows of a run's log, times apart."""
    rows = rows_of(job["run"]["dir"])
    return [{key: x for key, x in row.items() if not any(word in key for word in TIMES)} for row in rows]


def _in(job: Mapping, folder: Path, **engine: Any) -> Mapping:
    return {**job, "run": {**job["run"], "dir": str(folder)}, "engine": {**job.get("engine", {}), **engine}}


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_is_the_uninterrupted_one_to_the_last_digit(name: str, tmp_path: Path) -> None:
    """On two ranks, with dropout, stopped between two checkpoints and in the middle of an epoch."""
    job = TASKS[name].job(tmp_path, True)
    if not TASKS[name].accumulates and job["batch"].get("micro"):
        job["batch"]["micro"] //= 2
    whole, stopped = _in(job, tmp_path / "whole"), _in(job, tmp_path / "stopped")
    assert run_ranks(train_job, 2, whole) == [0, 0]
    assert run_ranks(train_job, 2, stopped_at(stopped, 4)) == [75, 75]
    assert len(_rows(stopped)) < len(_rows(whole)), "it was stopped on the way"
    assert run_ranks(train_job, 2, stopped, True) == [0, 0]
    assert len({row["loss"] for row in _rows(whole) if "split" not in row}) > 4, "there was something to repeat"
    assert _rows(stopped) == _rows(whole)


@pytest.mark.parametrize("name", NAMES)
def test_any_ranks_and_stages_learn_the_same(name: str, tmp_path: Path) -> None:
    """2, then 1, then 4 ranks, ZeRO 1, 3, 2, against 2 ranks: the same samples in each step, and the same losses.

    No rank stores more than its share of the queue, and the ledger of a task that has one finds each sample once.
    """
    row = TASKS[name]
    job = row.job(tmp_path, False)
    size = job["batch"].get("micro")
    recorded = name.startswith("capt")
    train = train_seen if recorded else train_job
    whole, parts = _in(job, tmp_path / "whole"), _in(job, tmp_path / "parts")
    if size and not row.accumulates:
        whole["batch"] = {**job["batch"], "micro": job["batch"]["global"] // 2}
    reference = run_ranks(train, 2, whole)
    steps: list[list[int]] = []
    for world, stage, stop in row.parts:
        part = _in(parts, tmp_path / "parts", **({} if stage is None else {"zero_stage": stage}))
        if size:
            micro = max(size, 4 // world) if row.accumulates else job["batch"]["global"] // world
            part["batch"] = {**job["batch"], "micro": micro}
        outcomes = run_ranks(train, world, stopped_at(part, stop), stop != 2)
        codes = [outcome[0] if recorded else outcome for outcome in outcomes]
        assert codes == [0 if stop is None else 75] * world
        if recorded:
            steps += [sorted(chain(*ranks)) for ranks in zip(*(ids for _, ids in outcomes), strict=True)]
        for shard in (shards := sorted(find_checkpoint(tmp_path / "parts").glob("queue-*"))):
            with safe_open(shard, "pt") as file:
                assert file.get_slice("rows").get_shape()[0] <= -(-job["contrast"]["queue"] // world)
        assert len(shards) in (0, world)
    if recorded:
        assert steps == [sorted(chain(*ranks)) for ranks in zip(*(ids for _, ids in reference), strict=True)]
        assert not check(tmp_path / "parts").faults
    ours, theirs = ([row for row in _rows(run) if "split" not in row] for run in (parts, whole))
    assert len(ours) == len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        losses = {key for key in other if key.startswith("loss")}
        assert losses == {key for key in mine if key.startswith("loss")}
        for key in losses:
            assert mine[key] == pytest.approx(other[key], rel=row.tolerance, abs=1e-7), (mine["step"], key)
