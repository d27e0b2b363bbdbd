"""A ``labels`` job for ``capt plan``: its table, if it is here, says what the labels and how many the rows are."""

from __future__ import annotations

from capt.finetune.labels.config import LabelsJob
from capt.finetune.labels.data import read_splits
from capt.finetune.plan import in_steps
from capt.finetune.plan import rehearse as rehearse_texts
from capt.pretrain.plan.rehearsal import Rehearsal


def completed(job: LabelsJob) -> LabelsJob:
    """Return the job with what its data say, and its epochs as steps; as it is where the data are not on this host."""
    if not job.data.train.is_file() or (job.data.kind is not None and job.schedule.epochs is None):
        return job
    splits = read_splits(job.data)
    return in_steps(job.with_data(splits.data), len(splits.train))


def rehearse(job: LabelsJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank in which every row is as long as it may be."""
    data = job.data
    assumed: tuple[str, ...] = ()
    kind = data.kind or "classification"
    if data.kind is None or (data.labels is None and kind != "regression"):
        columns = list(data.label_columns) if len(data.label_columns) > 1 else None
        labels = [] if kind == "regression" else data.labels or columns or ["0", "1"]
        data = data.model_copy(update={"kind": kind, "labels": labels or None})
        assumed = (f"data.kind={kind} with {max(1, len(labels))} outputs, for {data.train} is not on this host",)
    found = rehearse_texts(job.model_copy(update={"data": data}), world)
    return found._replace(assumed=(*assumed, *found.assumed))
