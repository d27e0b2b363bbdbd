"""Optimizers against the equations, parameter groups, and honest refusals."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.optim import build
from capt.pretrain.engine.optim.build import apex_available, build_optimizer, layer_depths, parameter_groups
from capt.pretrain.engine.optim.muon import muon_groups
from capt.pretrain.engine.optim.optimizers import Lamb
from capt.pretrain.engine.optim.settings import ModuleOptimizer, learning_rate


def _build(overrides: list[str], module: nn.Module) -> torch.optim.Optimizer:
    job = load_job("capt_tiny", overrides)
    return build_optimizer(job.optimizer, job.engine, module)


def _lamb_literally(w: list[float], gradients: list[list[float]], lr: float, decay: float) -> list[float]:
    """Algorithm 2 of You et al. 2020 with plain floats."""
    b1, b2, eps = 0.9, 0.999, 1e-6
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(gradients, 1):
        m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
        r = [(a / (1 - b1**t)) / ((b / (1 - b2**t)) ** 0.5 + eps) + decay * x for a, b, x in zip(m, v, w, strict=True)]
        ratio = (sum(x * x for x in w) ** 0.5) / (sum(x * x for x in r) ** 0.5) if decay else 1.0
        w = [x - lr * ratio * y for x, y in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_follows_the_equations(decay: float) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, dtype=torch.float64))
    start, gradients = p.detach().tolist(), torch.randn(4, 5, dtype=torch.float64)
    optimizer = Lamb([p], lr=0.01, weight_decay=decay)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    expected = _lamb_literally(start, gradients.tolist(), 0.01, decay)
    torch.testing.assert_close(p.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_lamb_leaves_the_ratio_at_one_for_zero_weights() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = Lamb([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "bert_adam", "adagrad", "sgd"])
def test_elementwise_optimizers_follow_the_equations(kind: str) -> None:
    """In float64 with plain floats: Loshchilov & Hutter 2019, Duchi et al. 2011, Sutskever et al. 2013."""
    settings = ["optimizer.lr=0.1", "optimizer.weight_decay=0.2", "optimizer.momentum=0.7", "optimizer.eps=1e-3"]
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    start, gradients = module.weight.detach()[0].tolist(), torch.randn(4, 1, 3, dtype=torch.float64)
    optimizer = _build([f"optimizer.type={kind}", *settings], module)
    for g in gradients:
        module.weight.grad = g.clone()
        optimizer.step()
    b1, b2 = load_job("capt_tiny").optimizer.betas
    expected = []
    for i, w in enumerate(start):
        m = v = 0.0
        for t, g in enumerate(gradients[:, 0, i].tolist(), 1):
            if kind == "adamw":
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                w -= 0.1 * 0.2 * w + 0.1 * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + 1e-3)
            elif kind == "bert_adam":
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                w -= 0.1 * (m / (v**0.5 + 1e-3) + 0.2 * w)
            elif kind == "adagrad":
                g += 0.2 * w
                v += g * g
                w -= 0.1 * g / (v**0.5 + 1e-3)
            else:
                m = 0.7 * m + g + 0.2 * w
                w -= 0.1 * m
        expected.append(w)
    torch.testing.assert_close(module.weight.detach()[0].tolist(), expected, rtol=1e-9, atol=0)


def test_stable_adamw_follows_the_equations() -> None:
    """Wortsman et al. 2023, Algorithm 2, in plain floats: each tensor by itself, with gradients that jump."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2, dtype=torch.float64)
    starts = [p.detach().flatten().tolist() for p in module.parameters()]
    gradients = [torch.randn(6 + 2, dtype=torch.float64) * size for size in (1.0, 30.0, 1.0, 5.0)]
    optimizer = _build(["optimizer.type=stable_adamw", "optimizer.lr=0.1", "optimizer.weight_decay=0.2"], module)
    for g in gradients:
        module.weight.grad, module.bias.grad = g[:6].view(2, 3).clone(), g[6:].clone()
        optimizer.step()
    (b1, b2), eps, slowed = load_job("capt_tiny").optimizer.betas, 1e-6, 0
    for p, w, part, decay in zip(module.parameters(), starts, (slice(0, 6), slice(6, 8)), (0.2, 0.0), strict=True):
        m, v = [0.0] * len(w), [0.0] * len(w)
        for t, each in enumerate(gradients, 1):
            g = each[part].tolist()
            m = [b1 * a + (1 - b1) * x for a, x in zip(m, g, strict=True)]
            v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, g, strict=True)]
            v_hat = [x / (1 - b2**t) for x in v]
            rms = (sum(x * x / max(y, eps**2) for x, y in zip(g, v_hat, strict=True)) / len(g)) ** 0.5
            rate, slowed = 0.1 / max(1.0, rms), slowed + (rms > 1.01)
            w = [x - rate * (decay * x + a / (1 - b1**t) / (y**0.5 + eps)) for x, a, y in zip(w, m, v_hat, strict=True)]
        torch.testing.assert_close(p.detach().flatten().tolist(), w, rtol=1e-12, atol=0)
    assert slowed >= 2, "the gradients do not jump"


def test_berts_adam_decays_vectors_too() -> None:
    module = nn.Linear(2, 2)
    (group,) = _build(["optimizer.type=bert_adam", "optimizer.weight_decay=0.1"], module).param_groups
    assert group["weight_decay"] == 0.1
    assert {id(p) for p in group["params"]} == {id(p) for p in module.parameters()}


def _orthogonal_literally(matrix: torch.Tensor) -> torch.Tensor:
    """Jordan 2024, in float64: a quintic polynomial of the singular values, five times."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_takes_the_matrices_and_adamw_the_rest(shape: tuple[int, int]) -> None:
    """Matrices against the equations in float64, and against torch's own in bf16; the others as torch's AdamW moves
    them; a learning rate that is set holds for both."""
    torch.manual_seed(0)
    rows, columns = shape
    ours, theirs = (
        nn.ModuleDict({
            "layers": nn.ModuleList([nn.Embedding(5, 4), nn.Linear(columns, rows), nn.LayerNorm(6)]),
            "head": nn.ModuleDict({"0": nn.Linear(3, 2, bias=False)}),
        }).double()
        for _ in range(2)
    )  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    optimizer = _build(["optimizer.type=muon", "optimizer.weight_decay=0.1", "engine.zero_stage=1"], ours)
    section = load_job("capt_tiny").optimizer
    table, weight, bias, gain, shift, head = theirs.parameters()
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    adam = {"betas": section.betas, "eps": section.eps}
    references: list[torch.optim.Optimizer] = [
        torch.optim.Muon([weight], weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([table, head], weight_decay=0.1, **adam),
        torch.optim.AdamW([bias, gain, shift], weight_decay=0.0, **adam),
    ]
    for step in range(3):
        rate = 0.1 / (1 + step)
        for group in [g for o in (optimizer, *references) for g in o.param_groups]:
            group["lr"] = rate
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        assert weight.grad is not None
        momentum = 0.95 * momentum + 0.05 * weight.grad
        ahead = 0.05 * weight.grad + 0.95 * momentum
        expected = expected - rate * 0.1 * expected - 0.2 * rate * max(shape) ** 0.5 * _orthogonal_literally(ahead)
        for each in (optimizer, *references):
            each.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if name == "layers.1.weight":
            torch.testing.assert_close(a.detach(), expected, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(a, b[1], rtol=0, atol=2e-2)
        else:
            assert torch.equal(a, b[1]), name


def test_muon_takes_no_adapters_and_refuses_a_model_without_layers() -> None:
    layer = nn.ModuleDict({"lora_A": nn.Linear(4, 2, bias=False), "base_layer": nn.Linear(4, 4, bias=False)})
    module = nn.ModuleDict({"layer": nn.ModuleList([nn.ModuleDict({"query": layer})])})
    (matrices,), _ = muon_groups(module, 0.0)
    assert [p.shape for p in matrices["params"]] == [(4, 4)]
    layer["base_layer"].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"optimizer\.type muon: .* set optimizer\.type=adamw"):
        muon_groups(module, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.type=lamb"], "its trust ratio is a norm per parameter"),
        (["optimizer.type=sparse_adam", "optimizer.weight_decay=0"], "updates the rows that a batch has looked up"),
        (["optimizer.type=adagrad", "optimizer.backend=apex"], "apex has no adagrad"),
        (["optimizer.type=sparse_adam", "engine.zero_stage=0"], r"set optimizer\.weight_decay=0"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_job("capt_tiny", ["engine.zero_stage=1", *settings])


def test_a_module_of_its_own_optimizer_is_refused_alike() -> None:
    """Its section is made by the task and has not been through the checks of a job."""
    job = load_job("capt_tiny", ["engine.zero_stage=1"])
    with pytest.raises(ConfigError, match=r"lamb needs engine\.zero_stage 0, got 1"):
        build_optimizer(job.optimizer.model_copy(update={"type": "lamb"}), job.engine, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (1, {"type": "adagrad", "weight_decay": 0.0}, r"ZeRO would flatten: set engine\.zero_stage=0, not 1"),
        (0, {"type": "adamw"}, r"type adamw has none: use adagrad, sparse_adam"),
        (0, {"type": "sgd", "weight_decay": 0.0}, r"set optimizer\.momentum=0, not 0\.95"),
        (0, {"type": "adagrad"}, r"set optimizer\.weight_decay=0, not 0\.01"),
    ],
)
def test_sparse_gradients_that_nothing_could_apply_are_refused(
    stage: int, changes: dict[str, object], message: str
) -> None:
    job = load_job("capt_tiny", [f"engine.zero_stage={stage}", "optimizer.weight_decay=0.01"])
    settings = {"table": ModuleOptimizer(job.optimizer.model_copy(update=changes))}
    with pytest.raises(ConfigError, match=f"module table has tables with sparse gradients, .*{message}"):
        build_engines({"table": nn.Embedding(3, 2, sparse=True)}, job, settings)


def test_vectors_do_not_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decay, rest = parameter_groups(module, 0.1)
    assert [tuple(p.shape) for p in decay["params"]] == [(4, 3)]
    assert (decay["weight_decay"], rest["weight_decay"], len(rest["params"])) == (0.1, 0.0, 3)


def test_the_log_says_which_optimizer_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _build([], nn.Linear(2, 2))
    assert "torch AdamW (fused)" in caplog.text or "apex FusedAdam" in caplog.text


def test_an_offloaded_state_is_not_given_to_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels run on a GPU, and the state lies in host memory."""
    monkeypatch.setattr(build, "apex_available", lambda: True)
    monkeypatch.setattr(build, "apex_available", lambda: True)
    module = nn.Linear(2, 2)
    for offload in (
        "engine.offload_optimizer=true",
        "engine.deepspeed_extra.zero_optimization={offload_optimizer: {device: cpu}}",
    ):
        assert isinstance(_build([offload], module), torch.optim.AdamW)
        with pytest.raises(ConfigError, match="keeps the state in host memory"):
            _build([offload, "optimizer.backend=apex"], module)


@pytest.mark.skipif(apex_available(), reason="NVIDIA apex is here")
def test_apex_is_refused_where_it_is_not() -> None:
    with pytest.raises(ConfigError, match="never `pip install apex`"):
        _build(["optimizer.backend=apex"], nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]), ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0])],
)
def test_warmup_and_decay(kind: str, expected: list[float]) -> None:
    job = load_job(
        "capt_tiny", ["schedule.max_steps=6", "schedule.warmup_steps=4", f"schedule.type={kind}", "optimizer.lr=1.0"]
    )
    rates = [learning_rate(step, job.schedule, job.optimizer) for step in range(7)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["sqrt", "linear"])
def test_wsd_decays_over_its_last_steps(decay: str) -> None:
    changes = ["schedule.max_steps=9", "schedule.warmup_steps=2", "schedule.type=wsd", "schedule.final=0.1"]
    job = load_job("capt_tiny", [*changes, "schedule.decay_steps=4", f"schedule.decay={decay}", "optimizer.lr=2.0"])
    falls = [1 - (u**0.5 if decay == "sqrt" else u) for u in (0.0, 0.25, 0.5, 0.75, 1.0)]
    expected = [1.0, 2.0, 2.0, 2.0, 2.0, *(0.2 + 1.8 * left for left in falls)]
    assert [learning_rate(step, job.schedule, job.optimizer) for step in range(10)] == pytest.approx(expected)
    stable = load_job("capt_tiny", [*changes, "optimizer.lr=2.0"])
    assert [learning_rate(step, stable.schedule, stable.optimizer) for step in (0, 1, 8, 9)] == [1.0, 2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match=r"warmup_steps 2 and schedule\.decay_steps 8 are longer than schedule\.max"):
        load_job("capt_tiny", [*changes, "schedule.decay_steps=8"])


def test_cosine_ends_at_zero() -> None:
    job = load_job(
        "capt_tiny", ["schedule.max_steps=8", "schedule.warmup_steps=0", "schedule.type=cosine", "optimizer.lr=2.0"]
    )
    assert [learning_rate(s, job.schedule, job.optimizer) for s in (0, 4, 8)] == pytest.approx(
        [2.0, 1.0, 0.0], abs=1e-12
    )


def test_depths_of_parameters_that_all_layers_share() -> None:
    """MPNet's bias of relative positions changes the output of the lowest layer too, and so does the LayerNorm of
    DeBERTa's relative positions."""
    module = torch.nn.ModuleDict({
        "embeddings": torch.nn.Linear(2, 2, bias=False),
        "encoder": torch.nn.ModuleDict({
            "layer": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)]),
            "relative_attention_bias": torch.nn.Linear(2, 2, bias=False),
            "LayerNorm": torch.nn.LayerNorm(2, bias=False),
        }),
        "head": torch.nn.Linear(2, 2, bias=False),
    })  # fmt: skip
    assert layer_depths(module, "optimizer.freeze") == {
        "embeddings.weight": 0, "encoder.layer.0.weight": 1, "encoder.layer.1.weight": 2,
        "encoder.relative_attention_bias.weight": 0, "encoder.LayerNorm.weight": 0, "head.weight": 3,
    }  # fmt: skip
