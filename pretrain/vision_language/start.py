"""The pretrained model that ``model.init`` names, whatever wrote it: a run of ours, Hugging Face, or airsplay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.models.hub import TOKENIZER_FILES, local_folder
from pretrain.models.lxmert.build import start_from as copy_weights
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.model import LxmertModel
from pretrain.models.lxmert.read import PretrainedLxmert, is_lxmert, read_lxmert
from pretrain.regions.store import RegionStore
from pretrain.vision_language.features import FeatureKind, read_features, require_features

_ANSWERS = "answer_head.outer."


@dataclass(frozen=True)
class Start:
    """Weights to start from.

    Attributes:
        source: what ``model.init`` says.
        pretrained: its sizes, weights and answers.
        tokenizer_folder: None where it has no tokenizer (airsplay's file).
        features: the kind of region features that it has seen; None where it does not say.
    """

    source: Path
    pretrained: PretrainedLxmert
    tokenizer_folder: Path | None
    features: FeatureKind | None

    @property
    def config(self) -> LxmertConfig:
        """Its sizes."""
        return self.pretrained.config


def read_start(source: Path) -> Start:
    """Read a run or checkpoint of ``capt_vl``, a Hugging Face folder (or hub id) or airsplay's ``.pth`` file.

    Raises:
        CheckpointError: it is none of these, or is damaged.
        DataError: its tokenizer cannot be read.
    """
    if is_lxmert(source):
        pretrained = read_lxmert(source)
        has_tokenizer = pretrained.tokenizer is not None
        return Start(source, pretrained, local_folder(source, TOKENIZER_FILES) if has_tokenizer else None, None)
    from pretrain.vision_language.restore import load_model  # DeepSpeed, which preparing alone does without

    restored = load_model(source)
    model = restored.model
    pretrained = PretrainedLxmert(model.config, dict(model.state_dict()), restored.tokenizer, restored.answers)
    return Start(source, pretrained, restored.checkpoint / "tokenizer", read_features(restored.checkpoint))


def require_same_features(start: Start, store: RegionStore) -> None:
    """Raise ``CheckpointError`` where the store's features are not of the kind that the model was trained on."""
    if start.features is not None:
        require_features(store, start.features, str(start.source))


def start_from(model: LxmertModel, start: Start, answers: Sequence[str] | None) -> None:
    """Copy the weights into ``model``. Heads for other classes start anew, and so do answers of another table.

    Raises:
        CheckpointError: the encoder does not fit.
    """
    pretrained = start.pretrained
    if answers is None or pretrained.answers is None or tuple(answers) != tuple(pretrained.answers):
        state = {name: tensor for name, tensor in pretrained.state.items() if not name.startswith(_ANSWERS)}
        pretrained = replace(pretrained, state=state)
    copy_weights(model, pretrained, str(start.source))
