"""The model under DeepSpeed's parameter partitioning, which gathers parameters by the module that runs."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.models.lxmert.model import LxmertModel
from tests.support import run_ranks
from tests.unit.models.lxmert.support import pairs, small_model, total


def _model(checkpointing: str) -> LxmertModel:
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_checkpointing": checkpointing}
    return small_model(dtype=torch.float32, **quiet)


def _train(stage: int, checkpointing: str) -> tuple[list[float], float]:
    import deepspeed

    import capt.pretrain.engine.engines.deepspeed  # noqa: F401 (which keeps DeepSpeed from compiling an operator first)

    module = _model(checkpointing)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
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
        loss = total(engine(**pairs(seed=seed, dtype=torch.float32).inputs)).float()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    batch = pairs(dtype=torch.float32)
    with torch.no_grad():
        s = engine.module.embed(batch.tokens, batch.features, batch.boxes, batch.present, padded=True)
    return losses, float(s.sum())


@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "none"), (2, "none"), (3, "none"), (3, "full")])
def test_trains_as_without_an_engine(stage: int, checkpointing: str) -> None:
    losses, embedding = run_ranks(_train, 1, stage, checkpointing)[0]
    model = _model("none").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    for seed in range(3):
        loss = total(model(**pairs(seed=seed, dtype=torch.float32).inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    batch = pairs(dtype=torch.float32)
    with torch.no_grad():
        s = model.eval().embed(batch.tokens, batch.features, batch.boxes, batch.present, padded=True)
    assert embedding == pytest.approx(float(s.sum()), rel=1e-4, abs=1e-4)
