"""``capt predict`` with a checkpoint of a ``visual`` job: answers to new questions, truth of new statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capt.finetune.evaluation import results_of_rows
from capt.finetune.new_rows import RowWindow, predict_file
from capt.finetune.visual.data import read_rows, require_own_ids, row_set
from capt.finetune.visual.evaluate import store_of
from capt.finetune.visual.module import FineTunedLxmert, load_visual, read_answers
from capt.pretrain.base import distributed
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import digest_of, sha256
from capt.pretrain.engine.checkpoint import read_manifest
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.pairs import located

BATCH = 64
"""Rows of a forward pass."""


class PicturePredictor:
    """A checkpoint and a file of questions or statements (`capt.finetune.new_rows.Predictor`).

    Args:
        trained: the checkpoint.
        file: questions or statements in a form of the task, with labels or without.
        regions: the region store, where it is not the one of the job.
        batch: rows of a forward pass.
    """

    predicted = "answer"

    def __init__(self, trained: FineTunedLxmert, file: Path, regions: Path | None, batch: int) -> None:
        self._trained, self._file, self._batch = trained, file, batch
        self._answers = read_answers(trained.job, trained.checkpoint)
        data = trained.job.data if regions else located(trained.job.data, trained.job.data.task)
        self._store = store_of(trained, data, regions)
        self._rows = read_rows([file], trained.job.data.visual_task, str(file))
        require_own_ids(self._rows, str(file))
        # All pictures are looked for before the first prediction.
        self._store.rows([name for row in self._rows for name in row.pictures], str(file))
        certainty = "score" if self._answers is not None else "probability_True"
        self.columns: dict[str, type] = {"id": str, "pictures": list, "text": str, "answer": str, certainty: float}

    def identity(self) -> dict[str, Any]:
        """Return the hashes of checkpoint and file, the key of the store, and the options."""
        manifest = read_manifest(self._trained.checkpoint)
        model = digest_of({name: record.sha256 for name, record in manifest.files.items()})
        return {
            "model": model, "file": sha256(self._file), "regions": self._store.manifest.key, "batch": self._batch,
        }  # fmt: skip

    def rows(self) -> Iterator[Example]:
        """Yield the questions or statements."""
        return iter(self._rows)

    def predict(self, rows: Sequence[Example]) -> RowWindow:
        """Return the answer to each question with its score (the sigmoid of its logit), or the truth of statements."""
        trained, answers, device = self._trained, self._answers, distributed.device()
        # Without their labels, which new rows do not have.
        bare = [row._replace(answers=None, truth=None) for row in rows]
        data = row_set(bare, trained.job.data, trained.tokenizer, self._store, answers, None)

        def keep(outputs: Tensor, _: Any) -> dict[str, Tensor]:
            if answers is None:
                return {"answer": outputs.argmax(1), "certainty": outputs.softmax(1)[:, 1]}
            best = outputs.max(1)
            return {"answer": best.indices, "certainty": torch.sigmoid(best.values)}

        found = results_of_rows(trained.model.to(device), data, keep, self._batch, device)
        cells = []
        for row, answer, certainty in zip(rows, found["answer"].tolist(), found["certainty"], strict=True):
            text = str(bool(answer)) if answers is None else answers.answers[answer]
            # The fewest digits that fp32 tells from others.
            values = (str(row.id), list(row.pictures), row.text, text, float(str(certainty)))
            cells.append(dict(zip(self.columns, values, strict=True)))
        return RowWindow(cells, 0)


def command(
    model: Path,
    file: Path,
    out: Path,
    *,
    regions: Path | str | None = None,
    batch: int = BATCH,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Answer the questions of a file, or judge its statements; see `capt.pretrain.commands`.

    ``out`` has id, pictures, text, answer, and the score of the answer or the probability of truth. ``regions`` is the
    region store, where it is not the one of the job. Raises ``CheckpointError`` and ``DataError``, also where the store
    holds features of another kind than those of the training, or a picture is not in it.
    """
    with distributed.synchronize_errors(patient=True):
        predictor = PicturePredictor(load_visual(model), file, None if regions is None else Path(regions), batch)
    return predict_file(predictor, file, out, progress=progress)
