"""Views of spans are drawn as literal loops draw them, from passages; a view is one function and a row."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data import views
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.passages import PassageDataset
from capt.pretrain.data.sampler import GroupedSampler
from capt.pretrain.data.shards import ShardSet
from capt.pretrain.data.views import VIEWS, Spans, View, draw_spans, find_view
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.batches import LanguageAssembler, LanguageBatch, ViewPlan
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.prepare import PreparedLanguage, prepare
from capt.pretrain.language.task import LanguageTask
from tests.language import language_mapping


def _literal(view: str, n: int, spans: Spans, longest: int, generator: np.random.Generator) -> list[list[int]]:
    """Both views of the tokens 0 .. n-1, by the definitions."""
    lengths = []
    for low, high in (spans.share, spans.second_share or spans.share):
        share = low + (high - low) * generator.random()
        lengths.append(min(max(round(share * n), spans.least), longest, n))
    if view == "crop":
        starts = [int(generator.integers(0, n - length + 1)) for length in lengths]
    else:
        room = n - spans.gap
        if sum(lengths) > room:
            first = min(max(round(room * lengths[0] / sum(lengths)), spans.least), room - spans.least)
            lengths = [first, room - first]
        before = 0 if int(generator.integers(0, 2)) else 1
        start = int(generator.integers(0, room - sum(lengths) + 1))
        starts = [start, start]
        starts[1 - before] += lengths[before] + spans.gap
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("view", ["crop", "neighbour"])
def test_spans_are_those_of_a_literal_loop(view: str) -> None:
    function, lengths = VIEWS[view].function(), set()
    for number, spans in enumerate((Spans(), Spans(least=3, gap=2, share=(0.05, 0.2), second_share=(0.5, 1.0)))):
        for n in (1, spans.shortest - 1, spans.shortest, spans.shortest + 1, 40, 333):
            for sample in range(20):
                drawn = draw_spans(function, np.arange(n), spans, 30, generator_for("test", number, 0, sample))
                if n < spans.shortest:
                    assert drawn is None
                    continue
                assert drawn is not None
                expected = _literal(view, n, spans, 30, generator_for("test", number, 0, sample))
                assert [part.tolist() for part in drawn] == expected
                assert all(spans.least <= len(part) <= 30 for part in drawn)
                lengths.add((len(drawn[0]), len(drawn[1])))
                if view == "neighbour":
                    left, right = sorted(map(list, drawn))
                    assert right[0] - left[-1] == 1 + spans.gap
    assert len(lengths) > 30


class _Shards(ShardSet):
    """A stream of documents of some lengths, whose tokens are their places in it; -1 at the end of each."""

    starts = np.zeros(0)  # type: ignore[assignment]

    def __init__(self, lengths: list[int]) -> None:
        self.documents, self.starts = len(lengths), np.cumsum([0, *(length + 1 for length in lengths)])
        self.stream = np.arange(self.starts[-1], dtype=np.int32)
        self.stream[self.starts[1:] - 1] = -1
        self.manifest: Any = SimpleNamespace(key="text")

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.stream[start:stop]


@pytest.mark.parametrize("longest", [None, 7, 40])
@pytest.mark.parametrize("apart", [None, 3, 16])
def test_passages_are_documents_or_their_runs(monkeypatch: pytest.MonkeyPatch, longest: Any, apart: Any) -> None:
    monkeypatch.setattr("capt.pretrain.data.passages.EVERY", 3)
    lengths, shortest = [1, 30, 7, 8, 2, 100, 1], 4
    for keep in (False, True):
        found = PassageDataset(_Shards(lengths), longest=longest, shortest=shortest, keep_short=keep, apart=apart)
        expected, instances, short, begin = [], [], 0, 0
        for n in lengths:
            runs = 1 if longest is None else max(1, -(-n // longest))
            cuts = [(n * run // runs, n * (run + 1) // runs) for run in range(runs)]
            first = len(expected)
            for at, until in cuts:
                short += n // runs < shortest
                if n // runs >= shortest or keep:
                    same = [i for i, (a, _) in enumerate(cuts) if apart and a // apart == at // apart]
                    instances.append(first + min(same) if same else len(expected))
                    expected.append(list(range(begin + at, begin + until)))
            begin += n + 1
        assert [found.passage(i).tokens.tolist() for i in range(len(found))] == expected
        assert [found.passage(i).instance for i in range(len(found))] == instances
        assert found.short == short > 0
    assert found.key != PassageDataset(_Shards(lengths), longest=longest, shortest=5, keep_short=keep, apart=apart).key


def test_a_group_of_passages_needs_the_shards_that_hold_it() -> None:
    """Documents have any length; each passage comes once an epoch."""
    shards = _Shards([*[3] * 40, 300, *[20] * 30, 5, 900, *[2] * 50])
    size = 64
    shards.manifest.shard_tokens = size
    shards.manifest.shards = [f"{i}" for i in range(-(-len(shards.stream) // size))]
    passages = PassageDataset(shards, longest=50, shortest=2, keep_short=False, by_shard=True)
    order = GroupedSampler(len(passages), passages.block, 3, 1)
    assert order.blocks <= len(shards.manifest.shards)
    _, found = order.locate(np.arange(len(passages)))
    assert sorted(found.tolist()) == list(range(len(passages)))
    assert found.tolist() != sorted(found.tolist())
    asked: list[int] = []
    read = shards.read
    shards.read = lambda start, stop: asked.extend([start, stop - 1]) or read(start, stop)  # type: ignore
    groups, most = order.groups_from(0), 0
    starts = [
        i for i in range(len(passages)) if i == 0 or next(order.groups_from(i))[0] != next(order.groups_from(i - 1))[0]
    ]
    for begin, end in itertools.pairwise([*starts, len(passages)]):
        _, blocks = next(groups)
        asked.clear()
        for number in found[begin:end].tolist():
            passages.passage(number)
        needed = {shard for block in blocks.tolist() for shard in passages.shards_of(block)}
        assert {place // size for place in asked} <= needed
        assert {min(needed), max(needed)} <= {place // size for place in asked}
        most = max(most, len(needed))
    assert most <= passages.shards_of_group(3) <= len(shards.manifest.shards)


def _prepared(folder: Path, **data: Any) -> tuple[LanguageJob, PreparedLanguage]:
    mapping = language_mapping(folder)
    mapping["data"] |= data
    mapping["mlm"] = {"views": "both"} if data.get("view") != "corrupted" else {}
    job = job_from_mapping(mapping, "test")
    assert isinstance(job, LanguageJob)
    return job, prepare(job)


def _assembler(job: LanguageJob, prepared: PreparedLanguage, plan: ViewPlan) -> LanguageAssembler:
    return LanguageAssembler(
        prepared.train, prepared.corruptor, seed=3, stream="corruption/train", shuffle=True,
        pad_id=prepared.tokenizer.special.pad, cross_document_attention=True, plan=plan,
    )  # fmt: skip


def _rows(batch: LanguageBatch) -> list[dict[str, Any]]:
    """Content of each sample, whatever its micro-batch was padded to."""
    n = len(batch.ids)
    assert batch.instances is not None
    return [
        {
            "views": [batch.tokens[i].tolist(), batch.corrupted[i].tolist()], "instance": int(batch.instances[i]),
            "labels": batch.labels.view(-1, n, batch.labels.shape[1])[:, i].tolist(),
        }
        for i in range(n)
    ]  # fmt: skip


def test_a_sample_is_the_same_in_any_micro_batch_and_masks_hide_what_they_predict(tmp_path: Path) -> None:
    job, prepared = _prepared(tmp_path, view="neighbour", passage=80, spans={"short": "whole"})
    plan = ViewPlan.of(job, "train")
    assert (plan.masked, ViewPlan.of(job, "validation").masked) == (2, 1)
    samples = np.arange(100, 130)
    whole = _rows(_assembler(job, prepared, plan)(samples, 0.3))
    cut = [row for part in np.split(samples, [4, 5, 17]) for row in _rows(_assembler(job, prepared, plan)(part, 0.3))]
    assert cut == whole
    plain = _assembler(job, prepared, ViewPlan(plan.draw, corrupts=False, masked=0, spans=plan.spans))(samples, 0.3)
    once = _assembler(job, prepared, ViewPlan(plan.draw, corrupts=False, masked=1, spans=plan.spans))(samples, 0.3)
    both = _assembler(job, prepared, plan)(samples, 0.3)
    assert once.tokens.equal(plain.tokens)
    assert both.corrupted.equal(once.corrupted), "the second view does not depend on whether the first is masked"
    n = len(samples)
    for view, noisy, rows in (
        (plain.tokens, both.tokens, slice(0, n)),
        (plain.corrupted, both.corrupted, slice(n, None)),
    ):
        used = both.labels[rows] != -100
        assert view.gather(1, both.positions[rows])[used].equal(both.labels[rows][used])
        assert not noisy.equal(view)
    assert bool((plain.labels == -100).all())
    pad = prepared.tokenizer.special.pad
    assert plain.width is not None
    assert bool((plain.tokens[:, plain.width :] == pad).all())
    moved = plain.to(plain.tokens.device)
    assert moved.tokens.shape[1] == plain.width <= 32


def test_short_texts_are_left_out_or_whole_beside_their_corruption(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    long = [f"the old house number {i} " + "stands by the river " * 20 for i in range(20)]
    text.write_text("\n\n".join(["a", "the house", "\u200b", *long, " "]))
    _, prepared = _prepared(tmp_path, view="crop", validation_fraction=0.0)
    assert len(prepared.train) == 20
    assert isinstance(prepared.train, PassageDataset)
    assert prepared.train.short == 2
    _, prepared = _prepared(tmp_path, view="crop", validation_fraction=0.0, spans={"short": "whole"})
    assert len(prepared.train) == 22
    plain = ViewPlan(VIEWS["crop"].function(), corrupts=False, masked=0)
    batch = LanguageAssembler(
        prepared.train, prepared.corruptor, seed=3, stream="s", shuffle=False, pad_id=prepared.tokenizer.special.pad,
        cross_document_attention=True, plan=plain,
    )(np.arange(22), 0.5)  # fmt: skip
    counts = (batch.tokens != prepared.tokenizer.special.pad).sum(1)
    assert counts[0] < 18
    assert int((batch.tokens[1] != batch.corrupted[1]).sum()) > 0, "a corruption"
    assert batch.tokens[1].shape == batch.corrupted[1].shape


def test_a_paragraph_is_a_line_of_text_or_of_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paragraphs = [f"the old house number {i} " + "stands by the river " * 20 for i in range(24)]
    documents = ["\n".join(paragraphs[i : i + 4]) for i in range(0, 24, 4)]
    (tmp_path / "books.txt").write_text("\n\n".join(documents))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"{text}\n"}) for text in documents))
    found = {}
    for name, passage in itertools.product(("books.txt", "rows.jsonl"), ("document", "paragraph")):
        files = {"files": [str(tmp_path / name)], "validation_fraction": 0.0}
        caplog.clear()
        job, prepared = _prepared(tmp_path, view="crop", passage=passage, **files)
        assert ("they seldom meet" in caplog.text) == (passage == "document")
        assert job_from_mapping(job.model_dump(mode="json", by_alias=True), "run").data == job.data
        assert isinstance(prepared.train, PassageDataset)
        read = [prepared.train.passage(i).tokens.tolist() for i in range(len(prepared.train))]
        found[name, passage] = [prepared.tokenizer.decode(tokens).strip() for tokens in read]
    for name in ("books.txt", "rows.jsonl"):
        assert found[name, "paragraph"] == [" ".join(text.split()) for text in paragraphs]
        assert len(found[name, "document"]) == 6
    # Shards hold the documents that they were made of.
    mapping = language_mapping(tmp_path)
    mapping["data"] |= {"files": [str(tmp_path / "books.txt")], "validation_fraction": 0.0}
    prepared = prepare(job_from_mapping(mapping, "test"))  # type: ignore[arg-type]
    (shards,) = (path.parent for path in (tmp_path / "cache" / "shards").glob("*/manifest.json")
                 if ShardSet.open(path.parent).manifest.key == prepared.train.key)  # fmt: skip
    (tmp_path / "prepared").mkdir()
    shards.rename(tmp_path / "prepared" / "train")
    mapping["tokenizer"] = {"path": str(prepared.tokenizer_folder)}
    mapping["data"] |= {"files": [], "shards": str(tmp_path / "prepared"), "view": "crop", "passage": "paragraph"}
    with pytest.raises(DataError, match="its documents are not the paragraphs of the text"):
        prepare(job_from_mapping(mapping, "test"))  # type: ignore[arg-type]


@pytest.mark.parametrize("passage", [0, -3, "sentence", True, 2.5])
def test_what_is_no_passage_is_said_in_a_line(tmp_path: Path, passage: Any) -> None:
    mapping = language_mapping(tmp_path)
    mapping["data"] |= {"view": "crop", "passage": passage}
    with pytest.raises(ConfigError) as raised:
        job_from_mapping(mapping, "test")
    assert "data.passage: " in str(raised.value)
    assert "give document, paragraph, or a number of tokens above 0" in str(raised.value)
    assert "\n" not in str(raised.value)


HALVES = View("halves", "tests.unit.data.test_views:halves")


def halves(tokens: int, spans: Spans, longest: int, generator: np.random.Generator) -> tuple[slice, slice]:
    """A view in a file of its own: both halves of a passage."""
    return slice(0, tokens // 2), slice(tokens // 2, tokens)


def test_other_packages_may_add_views(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = {"halves": "tests.unit.data.test_views:HALVES", "wrong": "tests.unit.data.test_views:halves"}
    monkeypatch.setattr(registry, "entry_point_values", lambda group: entries if group == views.GROUP else {})
    assert find_view("halves") is HALVES
    with pytest.raises(ConfigError, match="is not a View"):
        find_view("wrong")
    job, prepared = _prepared(tmp_path, view="halves", passage=40)
    batch = _assembler(job, prepared, ViewPlan(HALVES.function(), corrupts=False, masked=0))(np.arange(6))
    special, train = prepared.tokenizer.special, prepared.train
    assert isinstance(train, PassageDataset)
    for row, number in enumerate(batch.ids.tolist()):
        framed = [side[row][(side[row] != special.pad)].tolist() for side in (batch.tokens, batch.corrupted)]
        assert [token for part in framed for token in part[1:-1]] == train.passage(number).tokens.tolist()


@pytest.mark.parametrize(
    ("data", "fault"),
    [({"view": "crp"}, "unknown view 'crp'; did you mean 'crop'"),
     ({"passage": 100}, "data.view is corrupted"),
     ({"spans": {"gap": 1}}, "data.view is corrupted"),
     ({"view": "crop", "passage": 20}, "set data.passage to 32 or more"),
     ({"view": "neighbour", "passage": 100, "spans": {"gap": 1000}}, "1,016 tokens, 1,000 of them between them"),
     ({"view": "crop", "spans": {"gap": 1}}, "applies to neighbouring spans"),
     ({"view": "crop", "passage": "paragraph", "document_start": "="}, "every line begin a passage"),
     ({"passage": "paragraph"}, "data.view is corrupted"),
     ({"view": "crop", "apart": 20}, "set data.passage to a number"),
     ({"view": "crop", "sequence_length": 8}, "spans.least 8 is longer than"),
     ({"view": "crop", "spans": {"share": [0.5, 0.1]}}, "goes down")],
)  # fmt: skip
def test_impossible_views_are_refused(data: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        DataConfig(files=["x"], **data)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [({"data": {"view": "dropout"}, "model": {"dropout": 0.1}}, "leaves the text as it is"),
     ({"data": {"view": "dropout"}, "mlm": {"weight": 0}}, "both views are the same"),
     ({"data": {"view": "crop"}, "contrast": {"weight": 0}}, "contrast.weight is 0"),
     ({"mlm": {"views": "both"}}, "draws none"),
     ({"data": {"view": "crop"}, "mlm": {"views": "both", "weight": 0}}, "predicts nothing"),
     ({"data": {"view": "dropout"}, "mlm": {"weight": 0}, "model": {"dropout": 0.1}, "bottleneck": {"head": "bow"}},
      "a bottleneck's encoder reads a corrupted one")],
)  # fmt: skip
def test_views_that_do_not_go_with_the_losses_are_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    mapping = language_mapping(tmp_path)
    for section, values in changes.items():
        mapping[section] = {**mapping.get(section, {}), **values}
    with pytest.raises(ConfigError, match=fault):
        job_from_mapping(mapping, "test")


@pytest.mark.parametrize(("share", "view"), [(0.95, "corrupted"), (0.4, "crop")])
def test_a_job_says_before_training_when_there_is_little_to_learn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float, view: str
) -> None:
    job = job_from_mapping(language_mapping(tmp_path, mlm={"weight": 0}), "test")
    assert isinstance(job, LanguageJob)
    job = job.model_copy(update={"data": job.data.model_copy(update={"view": view})})
    task = LanguageTask.__new__(LanguageTask)
    ContrastTask.__init__(task, job)
    report = {
        "retrieval/to_corrupted": share,
        "retrieval/to_original": share,
        "uniformity": -2.0,
        "first_direction": 0.1,
    }
    with caplog.at_level("INFO"):
        for step in (0, 5):
            task.validated({**report}, Progress(step=step))
    assert caplog.text.count(f"before training {share:.1%} of the samples that are held out find their other view") == 1
    assert caplog.text.count("data.view=neighbour or crop") == (share > 0.9)


def test_other_spans_are_other_noise_and_have_no_noise_between_them(tmp_path: Path) -> None:
    """The ledger takes contents under other keys for others; views that are different spans do not differ by noise."""
    orders = set()
    for data, mlm in (({}, "second"), ({"spans": {"share": [0.2, 0.4]}}, "second"), ({}, "both")):
        mapping = language_mapping(tmp_path, mlm={"views": mlm})
        mapping["data"] |= {"view": "crop", **data}
        job = job_from_mapping(mapping, "test")
        assert isinstance(job, LanguageJob)
        assert not any(name.startswith("noise/") for name in job.metric_names())
        orders.add(LanguageTask(job, tmp_path / "run").sample_order().noise)
    assert len(orders) == 3


@pytest.mark.parametrize(("view", "share"), [("crop", 1.0), ("dropout", 0.0)])
def test_the_start_is_measured_without_dropout_unless_the_views_differ_by_it(view: str, share: float) -> None:
    task = LanguageTask.__new__(LanguageTask)
    task.job = Mock(spec=LanguageJob, data=Mock(spec=DataConfig, views=VIEWS[view]))
    engine, modes = Mock(spec=Engine, device=torch.device("cpu")), [True]
    engine.eval.side_effect, engine.train.side_effect = (lambda: modes.append(False)), (lambda: modes.append(True))

    def represent(engine: Any, part: Any, step: int) -> Views:
        # Dropout, as long as it is on, leaves no sample its own other view, and draws.
        torch.rand(3)
        s = torch.eye(4)
        return Views(s, s.roll(1, 0) if modes[-1] else s, torch.arange(4), 0.05)

    task.represent = represent  # type: ignore[assignment, method-assign]
    state = torch.get_rng_state()
    assert task._start_accuracy(engine, [Mock(spec=LanguageBatch)]) == share
    assert modes[-1]
    assert torch.equal(torch.get_rng_state(), state)
