"""Fine-tuning against the transformers Trainer: the same start, the same data order, the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.loop import Run, train
from capt.pretrain.engine.task import Progress
from tests.finetune import glue_mapping, write_encoder, write_task
from tests.support import run_ranks

STEPS = 20


def _ours(mapping: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run, and the weights of the head that it began with."""
    from capt.finetune.glue.task import GlueFineTuning
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=False)
    run_dir = Path(mapping["run"]["dir"])
    task = GlueFineTuning(job_from_mapping(mapping, "test"), run_dir)
    modules = task.build_modules()
    head = {k: v.numpy().copy() for k, v in modules["model"].state_dict().items() if not k.startswith("encoder.")}
    losses: list[float] = []
    step = task.step

    def remember(*arguments: Any) -> Any:
        report = step(*arguments)
        losses.append(float(report["loss"]))
        return report

    task.step = remember  # type: ignore[method-assign]
    train(Run(task.job, run_dir, task, build_engines(modules, task.job), Progress()), [])
    return {"losses": losses, "head": head}


def _trainers(
    folder: Path, mapping: dict[str, Any], head: dict[str, np.ndarray], names: tuple[str, str]
) -> list[float]:
    from capt.finetune.glue.files import read_split
    from capt.finetune.glue.tasks import glue_task

    task = glue_task(mapping["data"]["task"])
    examples = read_split(folder / "glue", task, "train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "encoder")
    pairs = tokenizer(examples.first, examples.second, truncation=True, max_length=64)
    assert examples.labels is not None
    labels = (examples.labels / 5.0 if task.regression else examples.labels).tolist()
    rows = [{**{k: v[i] for k, v in pairs.items()}, "label": label} for i, label in enumerate(labels)]
    losses: list[float] = []

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "encoder", num_labels=max(1, len(task.labels)), hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
    )  # fmt: skip
    own = model.state_dict()
    for mine, theirs in zip(("dense", "out"), names, strict=True):
        for kind in ("weight", "bias"):
            own[f"{theirs}.{kind}"].copy_(torch.from_numpy(head[f"{mine}.{kind}"]))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=True, per_device_train_batch_size=8, max_steps=STEPS,
        learning_rate=2e-3, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-6, weight_decay=0.1, max_grad_norm=0.0,
        lr_scheduler_type="linear", report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    InOrder(
        model=model, args=arguments, train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    ).train()  # fmt: skip
    return losses


@pytest.mark.parametrize(
    ("task", "cls", "names"),
    [
        ("rte", "RobertaForSequenceClassification", ("classifier.dense", "classifier.out_proj")),
        ("stsb", "RobertaForMaskedLM", ("classifier.dense", "classifier.out_proj")),
        ("mnli", "BertForMaskedLM", ("bert.pooler.dense", "classifier")),
    ],
)
def test_losses_of_the_trainer(task: str, cls: str, names: tuple[str, str], tmp_path: Path) -> None:
    write_task(tmp_path / "glue", task, train=8 * STEPS)
    write_encoder(tmp_path / "encoder", cls)
    mapping = glue_mapping(
        tmp_path, task,
        data={"shuffle": False},
        model={"classifier_dropout": 0.0},
        batch={"global": 8, "micro": 8},
        schedule={"epochs": None, "max_steps": STEPS, "warmup_ratio": 0.0},
        optimizer={"lr": 2e-3},
    )  # fmt: skip
    found = run_ranks(_ours, 1, mapping)[0]
    theirs = _trainers(tmp_path, mapping, found["head"], names)
    assert len(theirs) == STEPS
    assert max(theirs) - min(theirs) > 0.02, "the model must move for this to mean anything"
    np.testing.assert_allclose(found["losses"], theirs, atol=1e-4)
    if task == "rte":
        halves = run_ranks(_ours, 2, {**mapping, "batch": {"global": 8, "micro": 2}})
        np.testing.assert_allclose(np.mean([half["losses"] for half in halves], axis=0), theirs, atol=1e-4)
