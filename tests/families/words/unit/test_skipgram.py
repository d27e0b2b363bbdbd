"""The update without autograd against autograd in float64 on a literal loop over pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from capt.pretrain.embeddings.adversarial import Adversarial
from capt.pretrain.embeddings.corpus import open_corpus
from capt.pretrain.embeddings.positives import SegmentReader, Segments
from capt.pretrain.embeddings.skipgram import SkipGram
from capt.pretrain.embeddings.tables import LONGEST, EmbeddingTables
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from tests.embeddings import small_job


def _loop(x: torch.Tensor, y: torch.Tensor, segments: Segments, window: int, number: int) -> tuple[torch.Tensor, int]:
    """The loss of the module's docstring, pair by pair."""
    loss, pairs = torch.zeros((), dtype=torch.float64), 0
    words, shared = segments.words.tolist(), segments.noise.shape[1]
    for i, word in enumerate(words):
        around = range(max(0, i - segments.reach[i]), min(len(words), i + segments.reach[i] + 1))
        near = [j for j in around if j != i and segments.sentence[j] == segments.sentence[i] >= 0]
        for j in near:
            loss = loss - logsigmoid(x[word] @ y[words[j]])
        for k in segments.noise[i // segments.block].tolist():
            loss = loss - number * len(near) / shared * logsigmoid(-x[word] @ y[k])
        pairs += len(near)
    return loss, pairs


@pytest.mark.parametrize(("segments", "dim"), [([0], 5), ([2, 0], 12), ([], 3)])
def test_an_update_is_a_step_against_the_gradient_of_the_loop(tmp_path: Path, segments: list[int], dim: int) -> None:
    job = small_job(tmp_path, tmp_path / "run")
    reader = SegmentReader(open_corpus(job.data), job)
    read = reader.read(np.array(segments, dtype=np.int64))
    tables = EmbeddingTables(len(reader.noise), dim, 7, random_context=True)
    with torch.no_grad():
        for table in tables.parameters():
            table.mul_(2 * dim)  # scores of the size that training leads to
    x, y = (t.detach().double().requires_grad_() for t in (tables.input, tables.context))
    loss, pairs = _loop(x, y, read, 3, 5)
    rule = SkipGram(3, 5)
    found = rule.move(tables, read, 1e-3, measure=True)
    assert found is not None
    torch.testing.assert_close(found.total.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    assert int(found.pairs) == pairs
    if segments:
        loss.backward()
        for table, oracle in ((tables.input, x), (tables.context, y)):
            assert oracle.grad is not None
            expected = oracle.detach() - 1e-3 * oracle.grad
            torch.testing.assert_close(table.detach().double(), expected, rtol=1e-6, atol=1e-6)
            assert (oracle.grad.abs().sum(1) > 0).sum() > 10
    assert rule.move(tables, read, 0.01) is None


def test_a_step_that_is_too_long_is_shortened_row_by_row(tmp_path: Path) -> None:
    """At too high a learning rate each row moves along its gradient by LONGEST / (rate x curvature)."""
    job = small_job(tmp_path, tmp_path / "run")
    reader = SegmentReader(open_corpus(job.data), job)
    read = reader.read(np.array([0]))
    tables = EmbeddingTables(len(reader.noise), 5, 7, random_context=True)
    with torch.no_grad():
        for table in tables.parameters():
            table.mul_(20)
    x, y = (t.detach().double().requires_grad_() for t in (tables.input, tables.context))
    loss, _ = _loop(x, y, read, 3, 5)
    loss.backward()
    bends = torch.zeros(len(x), dtype=torch.float64)  # of the input rows
    near = read.neighbours(3)
    for i, word in enumerate(read.words.tolist()):
        around = [int(read.words[i + o - 3]) for o in range(7) if near[i, o]]
        noise = read.noise[i // read.block]
        weight = 5 * len(around) / len(noise)
        bends[word] += (y[around].square().sum() + weight * y[noise].square().sum()).detach() / 4
    rate = 0.1
    factor = (LONGEST / (rate * bends)).clamp(max=1)
    assert int((factor < 0.5).sum()) > 3
    assert int((factor == 1).sum()) > 3
    SkipGram(3, 5).move(tables, read, rate)
    assert x.grad is not None
    expected = x.detach() - rate * factor[:, None] * x.grad
    torch.testing.assert_close(tables.input.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_the_rows_path_of_the_tables_is_the_same_update(tmp_path: Path) -> None:
    """`rows` and `apply_gradients`, which other rules use, under SGD: the closed form is what autograd finds."""
    job = small_job(tmp_path, tmp_path / "run")
    reader = SegmentReader(open_corpus(job.data), job)
    read = reader.read(np.arange(2))
    one, other = (EmbeddingTables(len(reader.noise), 6, 7, random_context=True) for _ in range(2))
    SkipGram(3, 5).move(one, read, 0.1)
    words, block = torch.from_numpy(read.words), read.block
    noise = torch.from_numpy(read.noise)
    x, y = other.rows("input", words), other.rows("context", words)
    near = torch.from_numpy(read.neighbours(3))
    total = torch.zeros(())
    for i in range(len(words)):
        around = [i + o - 3 for o in range(7) if near[i, o]]
        total = total - logsigmoid(y[around] @ x[i]).sum()
    n = other.rows("context", noise.flatten()).view(*noise.shape, -1)
    scores = torch.einsum("bcd,bmd->bcm", x.view(-1, block, 6), n)
    weight = near.sum(1).view(-1, block, 1) * 5 / noise.shape[1]
    (total - (weight * logsigmoid(-scores)).sum()).backward()

    engine = LocalEngine("discriminator", other, job, ModuleOptimizer(job.optimizer))
    engine.set_learning_rate(0.1)
    other.apply_gradients(engine)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_the_adversarial_rule_shortens_the_same_steps(tmp_path: Path) -> None:
    """Self-adversarial weights that do not depend on the scores are plain skip-gram, too long steps included."""
    job = small_job(tmp_path, tmp_path / "run", "negatives.weights=self_adversarial", "negatives.alpha=1e-9")
    reader = SegmentReader(open_corpus(job.data), job)
    read = reader.read(np.arange(2))
    one, other = (EmbeddingTables(len(reader.noise), 6, 7, random_context=True) for _ in range(2))
    start = [table.detach().mul_(30).clone() for table in one.parameters()]
    for table in other.parameters():
        table.detach().mul_(30)
    engine = LocalEngine("discriminator", other, job, ModuleOptimizer(job.optimizer))
    engine.set_learning_rate(0.5)
    SkipGram(job.data.window, job.negatives.number).move(one, read, 0.5)
    index = {str(row): row for row in range(len(reader.noise))}
    Adversarial(job, index, reader.noise).update({"discriminator": engine}, read, 0, measure=False)
    for a, b, before in zip(one.parameters(), other.parameters(), start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert (a - before).norm(dim=1).max() > 1


def test_tables_start_alike_and_as_word2vec(tmp_path: Path) -> None:
    first, again, other = (EmbeddingTables(5000, 8, seed) for seed in (1, 1, 2))
    assert torch.equal(first.input, again.input)
    assert not torch.equal(first.input, other.input)
    assert not first.context.any()
    assert first.input.abs().max() <= 0.5 / 8
    assert abs(float(first.input.detach().std()) - 1 / 8 / 12**0.5) < 1e-3
