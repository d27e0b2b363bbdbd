"""The generated DeepSpeed configuration, and the mistakes DeepSpeed itself would swallow."""

from __future__ import annotations

from typing import Any

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config


def _config(world: int = 2, *overrides: str) -> dict[str, Any]:
    return deepspeed_config(load_job("capt_small", ["batch.global=64", "batch.micro=8", *overrides]), world)


def test_batch_identity_and_stage() -> None:
    config = _config(2, "engine.zero_stage=3", "engine.offload_param=true", "engine.offload_optimizer=true")
    assert config["train_batch_size"] == 64
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 64
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_param"], zero["offload_optimizer"]) == (
        3,
        {"device": "cpu"},
        {"device": "cpu"},
    )


@pytest.mark.parametrize(
    ("precision", "stage", "key", "value"),
    [
        ("bf16", 2, "torch_autocast", {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}),
        ("fp16", 0, "torch_autocast", {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": []}),
    ],
)
def test_precision(precision: str, stage: int, key: str, value: Any) -> None:
    config = _config(1, f"engine.precision={precision}", f"engine.zero_stage={stage}")
    assert config[key] == value
    assert "fp16" not in config


def test_fp16_scales_the_loss() -> None:
    assert _config(1, "engine.precision=fp16", "engine.zero_stage=2")["fp16"]["enabled"]
    assert "torch_autocast" not in _config(1, "engine.precision=fp32")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("zero_optimisation={stage: 2}", "did you mean 'zero_optimization'"),
        ("gradient_clippin=1.0", "DeepSpeed has no such key"),
        ("train_batch_size=8", "set batch.global"),
        ("zero_optimization={stage: 2}", "set engine.zero_stage"),
        ("communication_data_type=half", "must be one of fp32, bf16, fp16"),
        ("torch_autocast={enabled: true, dtype: float16}", r"torch_autocast\.enabled: set engine\.precision"),
        ("fp16={enabled: true}", r"fp16\.enabled: set engine\.precision"),
    ],
)
def test_extra_keys_are_checked(extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(1, f"engine.deepspeed_extra.{extra}")


def test_extra_is_merged_last_and_deeply() -> None:
    zero = _config(1, "engine.deepspeed_extra.zero_optimization={overlap_comm: false}")["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (1, False)


@pytest.mark.parametrize(
    ("overrides", "here"),
    [
        (["engine.zero_stage=2"], True),
        (["engine.precision=fp16"], False),
        (["engine.zero_stage=3"], False),
        (["engine.offload_optimizer=true"], False),
        (["engine.deepspeed_extra.zero_optimization={offload_optimizer: {device: cpu}}"], False),
        (["engine.deepspeed_extra.zero_optimization={cpu_offload: true}"], False),
    ],
    ids=str,
)
def test_one_of_the_two_clips(overrides: list[str], here: bool) -> None:
    config = _config(1, "optimizer.clip=0.5", *overrides)
    assert config["gradient_clipping"] == (0.0 if here else 0.5)
    assert config["zero_optimization"].get("compute_grad_norm", True) is not here


def test_batches_that_do_not_fit_are_a_user_error() -> None:
    with pytest.raises(ConfigError, match=r"batch\.global 64 leaves one of 65 ranks without a sequence"):
        _config(65)


def test_an_uneven_batch_is_one_of_whole_micro_batches_to_deepspeed() -> None:
    """It checks the product, and knows nothing of the rows of a micro-batch."""
    config = _config(3)
    assert config["gradient_accumulation_steps"] == 3
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["train_batch_size"] == 3 * 8 * 3
