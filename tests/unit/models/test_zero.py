"""The model under DeepSpeed's parameter partitioning, which gathers parameters by the module that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.models.capt import CaptModel
from tests.support import run_ranks
from tests.unit.models.support import batch, small_model


def _loss(out: Any) -> Tensor:
    return out.mlm_loss_sum / out.mlm_count + (out.s @ out.s_hat.T).logsumexp(0).mean()  # type: ignore[no-any-return]


def _model(checkpointing: str) -> CaptModel:
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_checkpointing": checkpointing}
    return small_model(dtype=torch.float32, **quiet)


def _train(stage: int, checkpointing: str) -> tuple[list[float], float]:
    import deepspeed

    import capt.pretrain.engine.engines.deepspeed  # noqa: F401 (which keeps DeepSpeed from compiling an operator first)

    module = _model(checkpointing)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
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
        loss = _loss(engine(*batch(seed=seed)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    with torch.no_grad():
        return losses, float(engine.module.embed(batch()[0], False).sum())


@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "none"), (3, "none"), (3, "full")])
def test_trains_as_without_an_engine(stage: int, checkpointing: str) -> None:
    (losses, embedding) = run_ranks(_train, 1, stage, checkpointing)[0]
    model = _model("none").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for seed in range(3):
        loss = _loss(model(*batch(seed=seed)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert embedding == pytest.approx(float(model.eval().embed(batch()[0], False).sum()), rel=1e-4)
