"""``checkpoint.best`` names what validation reports, which a job's configuration knows before anything is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.glue.tasks import GLUE
from capt.finetune.metrics import compute_metrics
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrastive import metrics
from capt.pretrain.contrastive.metrics import METRICS, Metric, names_of
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.task import LanguageTask
from docs.hooks import metrics_markdown
from tests.language import language_mapping

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


def test_a_metric_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric of each kind is validated, evaluated, accepted by ``checkpoint.best`` and documented."""
    rows = (
        Metric(("perplexity",), "tokens", lambda loss, correct, count: [math.exp(loss / count)], ("of masked tokens",)),
        Metric(("cosine",), "pairs", lambda s, s_hat, tau: [float((s * s_hat).sum(1).mean())], ("to the own view",)),
        Metric(("norm",), "noise", lambda z, z_hat: [float(z.norm(dim=1).mean())], ("length of the rows",)),
    )
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, *rows))
    mapping = language_mapping(tmp_path, checkpoint={"best": "noise/mean/norm"})
    job: Any = job_from_mapping(mapping, "test")
    task = LanguageTask(job, tmp_path / "run")
    module = task.build_modules()["model"].eval()
    engine = LocalEngine("model", module, job, ModuleOptimizer(job.optimizer))
    found = task.validate({"model": engine}, Progress())
    assert found.keys() == job.metric_names()
    assert found["perplexity"] == pytest.approx(math.exp(found["loss/mlm"]))
    assert found["cosine"] == pytest.approx(1 - found["alignment"] / 2, abs=1e-5)
    assert found["noise/mean/norm"] > 0
    assert "| `perplexity` | of masked tokens | no |" in metrics_markdown()
    assert "| `cosine` | to the own view | yes |" in metrics_markdown()
    assert "| `norm` | length of the rows |" in metrics_markdown("noise")
    mapping["contrast"] = {"weight": 0.0, "queue": 0}
    assert job_from_mapping(mapping, "test").metric_names() == job.metric_names() - set(names_of("pairs"))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.names[0])
def test_every_metric_is_described(metric: Metric) -> None:
    assert len(metric.about) == len(metric.names)
    assert all("|" not in text for text in metric.about)


@pytest.mark.parametrize("task", sorted(name for name, task in GLUE.items() if "train" in task.splits))
def test_the_names_are_those_of_glue(task: str) -> None:
    labels = np.arange(4) if GLUE[task].regression else np.arange(4) % 2
    found = {
        "loss",
        *compute_metrics(GLUE[task].metrics, labels.astype(np.float32 if GLUE[task].regression else int), labels),
    }
    names = load_job(task, HERE).metric_names()
    assert names == found | ({f"{name}_mismatched" for name in found} if task == "mnli" else set())
