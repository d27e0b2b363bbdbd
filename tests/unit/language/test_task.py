"""Messages and refusals of the language task before it trains."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrast import ShardedQueue
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.prepare import prepare
from capt.pretrain.language.task import LanguageTask
from tests.language import language_mapping


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has TF32")
def test_tf32_without_a_gpu_is_refused_before_data_is_prepared(tmp_path: Path) -> None:
    job = job_from_mapping(language_mapping(tmp_path, contrast={"precision": "tf32"}), "test")
    with pytest.raises(ConfigError, match=r"contrast\.precision tf32"):
        LanguageTask(job, tmp_path / "run")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("queue", "short"), [(64, False), (63, True)])
def test_a_queue_of_less_than_a_step_is_noticed_under_accumulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, queue: int, short: bool
) -> None:
    mapping = language_mapping(tmp_path, batch={"global": 32, "micro": 2}, contrast={"queue": queue})
    task = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        task.build_modules()
    assert ("holds less than one step, which pushes 64" in caplog.text) == short


@pytest.mark.parametrize("sizes", [{"model": {"hidden": 65_536, "layers": 1000}}, {"contrast": {"queue": 2**31 - 1}}])
def test_sizes_beyond_the_hosts_memory_are_refused(sizes: dict[str, dict[str, int]], tmp_path: Path) -> None:
    """Else the system kills something; a run folder from somebody else may ask for it."""
    task = LanguageTask(job_from_mapping(language_mapping(tmp_path), "test"), tmp_path / "run")
    task.model_config = task.model_config.model_copy(update=sizes.get("model", {"hidden": 4096}))
    task.job = task.job.model_copy(update={"contrast": task.job.contrast.model_copy(update=sizes.get("contrast", {}))})
    with pytest.raises(ConfigError, match=r"GiB (on every rank, this|for \d+ numbers a row, and this) host has"):
        task.build_modules()


def test_another_drift_begins_with_an_empty_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that collapses is told to set ``contrast.drift`` and to continue from before the fall."""

    def task(drift: str) -> LanguageTask:
        mapping = language_mapping(tmp_path, contrast={"queue": 64, "drift": drift})
        made = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
        made.build_modules()
        return made

    def queue(of: LanguageTask) -> ShardedQueue:
        assert of.contrast is not None
        assert of.contrast.queue is not None
        return of.contrast.queue

    plain = task("none")
    rows = torch.nn.functional.normalize(torch.randn(8, queue(plain).dim), dim=1)
    queue(plain).enqueue(rows)
    state = plain.save_state(tmp_path)
    same, other = task("none"), task("moments")
    same.load_state(tmp_path, state)
    with caplog.at_level(logging.WARNING):
        other.load_state(tmp_path, state)
    assert (len(queue(same)), len(queue(other))) == (8, 0)
    assert "the queue begins empty: its rows in" in caplog.text
    assert "are of contrast.drift=none, this job has moments" in caplog.text


@pytest.mark.parametrize("samples", [1, 2, 40])
@pytest.mark.parametrize(("lines", "rate"), [(1, 0.15), (3, 0.15), (60, 0.15), (60, 1e-4)])
def test_what_validation_would_refuse_is_known_before_the_first_step(
    tmp_path: Path, samples: int, lines: int, rate: float
) -> None:
    (tmp_path / "held_out.txt").write_text("some words to be masked\n\n" * lines)
    mapping = language_mapping(
        tmp_path, validate={"samples": samples}, corruption={"rate": rate},
        data={"validation_files": str(tmp_path / "held_out.txt"), "validation_fraction": 0.0},
    )  # fmt: skip
    task = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    module = task.build_modules()["model"]
    engines = {"model": LocalEngine("model", module.eval(), task.job, ModuleOptimizer(task.job.optimizer))}
    fault = task.validation_fault()
    try:
        report = task.validate(engines, Progress())
    except DataError:
        assert fault
    else:
        assert not fault
        assert report["validation_samples"] == min(samples, len(task.prepared.validation[""]))


def test_a_number_of_samples_that_no_run_reaches_is_refused(tmp_path: Path) -> None:
    task = LanguageTask(job_from_mapping(language_mapping(tmp_path), "test"), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"state.json: 4611686018427387904 samples are over 16,777,216 epochs"):
        task.build_batches(Progress(step=1, samples=2**62))


def test_a_step_without_a_masked_token_has_no_masked_loss(tmp_path: Path) -> None:
    """The factor of its sum is 0, which is what a step that is logged leaves its value out by."""
    task = LanguageTask(job_from_mapping(language_mapping(tmp_path), "test"), tmp_path / "run")
    batch = next(task.build_batches(Progress()))
    device = torch.device("cpu")
    assert float(task.scales(batch, device)["mlm"]) > 0
    bare = [dataclasses.replace(part, labels=torch.full_like(part.labels, IGNORE)) for part in batch]
    assert float(task.scales(bare, device)["mlm"]) == 0


def test_documents_of_both_splits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mapping = language_mapping(tmp_path)
    documents = (tmp_path / "text.txt").read_text().strip().split("\n\n")
    (tmp_path / "held_out.txt").write_text("\n\n".join([*documents[:3], "Words of its own."]) + "\n")
    mapping["data"]["validation_files"] = [str(tmp_path / "held_out.txt")]
    prepare(job_from_mapping(mapping, "test"))  # type: ignore[arg-type]
    assert "validation text overlaps training text: 3 of 4 documents are in both" in caplog.text


def test_the_weight_of_masked_words_scales_their_gradient_alone(tmp_path: Path) -> None:
    """The loss is linear in ``mlm.weight``; at 0 the contrast is trained alone, and the words are still measured."""

    def step(weight: float) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        mapping = language_mapping(
            tmp_path, mlm={"weight": weight}, contrast={"queue": 0}, batch={"global": 8, "micro": 4},
            model={"dropout": 0.0, "attention_dropout": 0.0}, optimizer={"clip": 0.0},
        )  # fmt: skip
        task = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
        module = task.build_modules()["model"]
        seen: dict[str, torch.Tensor] = {}
        engine = LocalEngine("model", module, task.job, ModuleOptimizer(task.job.optimizer))

        def keep(*_: object) -> None:
            for name, parameter in module.named_parameters():
                seen[name] = torch.zeros(()) if parameter.grad is None else parameter.grad.clone()

        engine.step = keep  # type: ignore[method-assign]
        report = task.step({"model": engine}, next(task.build_batches(Progress())), Progress())
        return {name: float(value) for name, value in report.items() if name.startswith("loss")}, seen

    one, none, three = step(1.0), step(0.0), step(3.0)
    assert one[0]["loss/mlm"] == none[0]["loss/mlm"] == three[0]["loss/mlm"]
    assert none[0]["loss"] == none[0]["loss/capt"]
    assert three[0]["loss"] == pytest.approx(3 * one[0]["loss/mlm"] + one[0]["loss/capt"])
    assert not none[1]["capt.mlm.dense.weight"].any()
    for name, gradient in three[1].items():
        expected = 3 * one[1][name] - 2 * none[1][name]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlm": {"weight": 0.0}, "contrast": {"weight": 0.0}}, "mlm.weight and contrast.weight are both 0"),
        ({"mlm": {"head": "identity"}}, "mlm.head=identity is for a model.init"),
        ({"mlm": {"weight": -1.0}}, "greater than or equal to 0"),
    ],
)
def test_settings_of_the_masked_loss_that_train_nothing_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job_from_mapping(language_mapping(tmp_path, **changes), "test")
