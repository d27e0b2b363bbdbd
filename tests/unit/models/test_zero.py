"""Models under DeepSpeed's parameter partitioning, which gathers parameters by the module that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support import run_ranks
from tests.unit.models import support
from tests.unit.models.lxmert import support as lxmert


def _text_loss(model: Any, seed: int) -> Tensor:
    out = model(*support.batch(seed=seed))
    return out.mlm_loss_sum / out.mlm_count + (out.s @ out.s_hat.T).logsumexp(0).mean()  # type: ignore[no-any-return]


def _picture_loss(model: Any, seed: int) -> Tensor:
    return lxmert.total(model(**lxmert.pairs(seed=seed, dtype=torch.float32).inputs))


def _pictures(model: Any) -> Tensor:
    batch = lxmert.pairs(dtype=torch.float32)
    vectors: Tensor = model.embed(batch.tokens, batch.features, batch.boxes, batch.present, padded=True)
    return vectors


class _Family(NamedTuple):
    """How a model is made, its loss on the batch of a seed, the vectors of a batch, and a learning rate."""

    build: Callable[..., Any]
    loss: Callable[[Any, int], Tensor]
    embed: Callable[[Any], Tensor]
    lr: float


FAMILIES = {
    "roberta": _Family(support.small_model, _text_loss, lambda model: model.embed(support.batch()[0], False), 0.1),
    "lxmert": _Family(lxmert.small_model, _picture_loss, _pictures, 0.01),
}


def _model(family: str, checkpointing: str) -> Any:
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_checkpointing": checkpointing}
    return FAMILIES[family].build(dtype=torch.float32, **quiet)


def _train(family: str, stage: int, checkpointing: str) -> tuple[list[float], float]:
    import deepspeed

    import capt.pretrain.engine.engines.deepspeed  # noqa: F401 (which keeps DeepSpeed from compiling an operator first)

    module, _, loss_of, embed, lr = _model(family, checkpointing), *FAMILIES[family]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=lr),
        config={
            "train_batch_size": 5,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 0.0,  # its default is 1
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        dist_init_required=False,
    )
    losses = []
    for seed in range(3):
        loss = loss_of(engine, seed)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    with torch.no_grad():
        return losses, float(embed(engine.module).sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "none"), (2, "none"), (3, "none"), (3, "full")])
def test_trains_as_without_an_engine(family: str, stage: int, checkpointing: str) -> None:
    losses, embedding = run_ranks(_train, 1, family, stage, checkpointing)[0]
    model, _, loss_of, embed, lr = _model(family, "none").train(), *FAMILIES[family]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    expected = []
    for seed in range(3):
        loss = loss_of(model, seed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert embedding == pytest.approx(float(embed(model.eval()).sum()), rel=1e-4, abs=1e-4)
