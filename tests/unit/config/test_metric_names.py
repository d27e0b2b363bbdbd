"""``checkpoint.best`` names what validation reports, which a job's configuration knows before anything is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capt.finetune.glue.tasks import GLUE
from capt.finetune.metrics import compute_metrics
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.contrast.metrics import MaskedTokenAccumulator, contrast_metrics, noise_invariance
from capt.pretrain.language.config import CONTRAST_METRICS, MASKED_METRICS, NOISE_METRICS

HERE = ["data.path=glue", "model.init=encoder"]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("capt_tiny", ["checkpoint.best=los/mlm"], "validation reports no 'los/mlm'; did you mean 'loss/mlm'?"),
        ("mlm_tiny", ["checkpoint.best=alignment"], "validation reports no 'alignment'; known: accuracy/mlm, loss/mlm"),
        ("rte", [*HERE, "checkpoint.best=acuracy"], "did you mean 'accuracy'?"),
        ("ptb/vae", ["checkpoint.best=nelbo_dual"], "validation reports no 'nelbo_dual'"),
        ("clusters_k4", ["checkpoint.best=rec"], "validation reports no 'rec'"),
    ],
)
def test_a_mistyped_metric_is_refused_at_once(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(name, overrides)
    assert message in str(error.value)


def test_the_names_are_those_of_the_measures() -> None:
    rows = torch.nn.functional.normalize(torch.randn(4, 3), dim=1)
    assert set(CONTRAST_METRICS) == contrast_metrics(rows, rows, 0.1).keys()
    assert set(NOISE_METRICS) == noise_invariance(rows, rows.flip(0)).keys()
    masked = MaskedTokenAccumulator()
    masked.update(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
    assert {*masked.compute(), "validation_samples"} == set(MASKED_METRICS)


@pytest.mark.parametrize("task", sorted(name for name, task in GLUE.items() if "train" in task.splits))
def test_the_names_are_those_of_glue(task: str) -> None:
    labels = np.arange(4) if GLUE[task].regression else np.arange(4) % 2
    found = {
        "loss",
        *compute_metrics(GLUE[task].metrics, labels.astype(np.float32 if GLUE[task].regression else int), labels),
    }
    names = load_job(task, HERE).metric_names()
    assert names == found | ({f"{name}_mismatched" for name in found} if task == "mnli" else set())
