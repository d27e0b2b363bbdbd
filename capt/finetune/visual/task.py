"""The ``visual`` task: LXMERT under a new head, on questions or statements about pictures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capt.finetune.task import FineTuningTask, Identity
from capt.finetune.visual.backbone import TRUTHS, encoder_of, read_backbone, start_from
from capt.finetune.visual.config import VisualJob
from capt.finetune.visual.data import Splits, answer_table, data_digest, read_splits, row_set, without_missing
from capt.finetune.visual.module import PictureClassifier, classifier, read_answers
from capt.finetune.visual.objective import objective_of
from capt.pretrain.base.errors import ConfigError, quoted
from capt.pretrain.base.verification import Verifier, all_ranks, digest_of
from capt.pretrain.config.schema import Job
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import LxmertConfig, encoder_flops
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.load import (
    ANSWERS,
    REGIONS,
    FeatureKind,
    Start,
    read_features,
    require_features,
    require_same_answers,
)
from capt.pretrain.vision_language.pairs import located
from capt.pretrain.vision_language.prepare import train_tokenizer
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class VisualFineTuning(FineTuningTask):
    """Binary cross entropy of soft scores (VQA, GQA), or cross entropy of false and true (NLVR2)."""

    job: VisualJob

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, VisualJob)
        task = job.data.visual_task
        with all_ranks().synchronize_errors():
            data = located(job.data, job.data.task)
            regions = data.require_files()
        self.store = RegionStore.open(regions, Verifier(data.cache, all_ranks()), cache=data.cache)
        # Rows first: the answer table and, from scratch, the tokenizer are made of them.
        splits = read_splits(data)
        if data.missing_pictures == "skip":
            splits = without_missing(splits, self.store)
        self.answers = answer_table(data, splits)
        self._backbone = None if job.model.scratch else read_backbone(job)
        self.tokenizer = self._tokenizer(job, splits)
        self.config = _encoder(job, self._backbone, self.tokenizer, self.store)
        common = (data, self.tokenizer, self.store, self.answers)
        self._train = train = row_set(splits.train, *common, "data.train")
        validation = row_set(splits.validation, *common, "data.validation")
        super().__init__(
            job.with_encoder(self.config),
            task.name,
            train,
            {"": validation},
            objective_of(task),
            identity={
                "task": Identity(data.task, "data.task"),
                "tokenizer": Identity(self.tokenizer.fingerprint, "tokenizer of model.init"),
                "data": Identity(data_digest(splits, self.store, self.answers), "data"),
            },
            bucketing=data.bucketing,
            shuffle=data.shuffle,
        )
        self._exported = run_dir

    def _tokenizer(self, job: VisualJob, splits: Splits) -> TextTokenizer:
        if self._backbone is not None:
            assert self._backbone.pretrained.tokenizer is not None, "read_backbone refuses one without it"
            return self._backbone.pretrained.tokenizer
        if job.tokenizer.path is not None:
            with all_ranks().synchronize_errors():
                return load_tokenizer(local_folder(job.tokenizer.path, TOKENIZER_FILES))
        positions = (job.model.encoder or LxmertConfig()).max_positions
        sentences = [row.text for row in splits.train]
        key = digest_of(sentences)
        return load_tokenizer(
            train_tokenizer(job.tokenizer, key, lambda: sentences, job.data.cache, positions, all_ranks())
        )

    def build_model(self) -> PictureClassifier:
        """The pretrained encoder under a new head, or all of it from scratch."""
        model = classifier(self.job, self.answers)
        if self._backbone is None:
            logger.warning("model.init=scratch: the model starts from random weights, without any pretraining")
        else:
            start_from(model, self._backbone, TRUTHS if self.answers is None else self.answers.answers)
        return model

    def flops_per_row(self, length: float) -> float:
        """Forward FLOP of the encoder on a sentence with each of its pictures; those of the head are few."""
        rows, pictures = self._train, self.job.data.visual_task.pictures
        return pictures * encoder_flops(self.config, rows.mean_words, rows.mean_regions)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """The same of other tasks, and answers to new questions."""
        predict = f"capt predict {quoted(run_dir)} FILE --out predictions.csv (answers to new rows)"
        return [*super().next_steps(run_dir), predict]

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another task or tokenizer, and of other data unless ``data.allow_change`` is set.

        Even then it must be of the same answers and the same kind of features.

        Raises:
            CheckpointError: it is one.
        """
        require_features(self.store, read_features(folder), str(folder), allow_other=self.job.data.allow_other_features)
        tables = (read_answers(self.job, folder), self.answers)
        require_same_answers(folder, *(None if table is None else table.answers for table in tables))
        if self.job.data.allow_change and isinstance(state.get("data"), str):
            # Today's data in the checkpoint's place, so that the comparison below passes.
            state = {**state, "data": self._identity["data"].value}
        super().load_state(folder, state)

    def export_files(self) -> Mapping[str, Path]:
        """Tokenizer, kind of features and answer table travel with every checkpoint."""
        folder = self._exported
        self.tokenizer.save(folder / "tokenizer")
        files = {"tokenizer": folder / "tokenizer", REGIONS: FeatureKind.of(self.store).save(folder)}
        if self.answers is not None:
            self.answers.save(folder / ANSWERS)
            files[ANSWERS] = folder / ANSWERS
        return files


def _encoder(job: VisualJob, backbone: Start | None, tokenizer: TextTokenizer, store: RegionStore) -> LxmertConfig:
    """The sizes of the model. Raises ``CheckpointError`` where the store is not of the kind that it was trained on."""
    size = store.manifest.feature_size
    base = (job.model.encoder or LxmertConfig()) if backbone is None else backbone.config
    if backbone is not None:
        # A model that does not say what its features are is compared by their size alone.
        known = FeatureKind.of(store).model_copy(update={"feature_size": base.known("feature_size")})
        allow = job.data.allow_other_features
        require_features(store, backbone.features or known, str(backbone.source), allow_other=allow)
        if backbone.features is None:
            logger.warning("%s does not say what features it was trained on; they must be those of %s",
                           backbone.source, store.folder)  # fmt: skip
    if job.data.sequence_length > base.max_positions:
        raise ConfigError(
            f"data.sequence_length {job.data.sequence_length} is longer than the {base.max_positions} positions of "
            "the model"
        )
    return encoder_of(job, base, tokenizer, size)


TASK = VisualFineTuning
