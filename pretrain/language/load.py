"""Load a trained model from a checkpoint or a Hugging Face folder, for evaluation and conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.task import LanguageModule
from capt.pretrain.models.capt import CaptModel, build_model, unpadded
from capt.pretrain.models.hf_map import MLM
from capt.pretrain.models.hf_model import read_hf
from capt.tokenizer.encode import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode (without rows that padded the vocabulary), its tokenizer and its job."""

    checkpoint: Path
    model: CaptModel
    tokenizer: TextTokenizer
    job: LanguageJob
    has_mlm: bool = True
    """False where the masked-language-model head was never trained (a bare encoder from elsewhere)."""


def load_model(path: Path) -> LoadedModel:
    """Load a checkpoint, or the best one of a run (without ``checkpoint.best`` the newest), after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, LanguageJob, "capt_language")
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    plain = config.model_copy(update={"compile": False, "activation_checkpointing": "none"})
    module = load_module(checkpoint, "model", lambda: LanguageModule(job, plain))
    return LoadedModel(checkpoint, unpadded(module.capt).eval(), tokenizer, job)


def load_hf(folder: Path) -> LoadedModel:
    """The masked-language model in ``folder``, in evaluation mode; its windows are as long as its position table.

    It has an aggregation head only where ``capt_head.safetensors`` (our own exports) brings one. Where the folder has
    no masked-language-model head, `LoadedModel.has_mlm` is false and that of the model holds random weights.

    Raises:
        UserError: as `read_hf` does, or a tensor has the wrong shape.
    """
    source = read_hf(folder)
    state = source.state
    if not source.has_mlm:
        fresh = CaptModel(source.config, contrast=source.has_head).state_dict()
        state = {name: tensor for name, tensor in fresh.items() if name.startswith(MLM)} | state
    model = build_model(state, source.config, str(folder))
    mapping = {
        "task": {"type": "capt_language"},
        "data": {"sequence_length": source.config.max_positions},
        "model": source.config.model_dump(mode="json", by_alias=True),
        "contrast": {"weight": float(source.has_head)},
    }
    job = job_from_mapping(mapping, str(folder))
    assert isinstance(job, LanguageJob)
    return LoadedModel(folder, model, source.tokenizer, job, has_mlm=source.has_mlm)
