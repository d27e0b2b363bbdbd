"""Load a trained model, to measure or convert it, or its encoder alone, which another job starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.bottleneck.folder import pooling_of_heads
from capt.pretrain.bottleneck.heads import Bottleneck
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint, read_job, read_weights, verify
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.module import LanguageModule
from capt.pretrain.models.capt import CaptModel, build_model, unpadded
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import PretrainedEncoder, encoder_keys, load_encoder, read_encoder
from capt.pretrain.models.foreign.families import own_encoder, read_description, read_tokenizer
from capt.pretrain.models.hf_config import local_folder
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.models.hf_map import MLM, to_hf
from capt.pretrain.models.hf_model import read_hf
from capt.pretrain.models.lora import merged_weights
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.tokenizer.encode import TextTokenizer, load_tokenizer


def trained_pooling(path: Path) -> Literal["mean", "cls"] | None:
    """Return the pooling of the vector that a bottleneck has trained, of a run of ours or an export; None without one.

    Raises:
        CheckpointError: what says so is damaged.
    """
    if is_hf(path):
        return pooling_of_heads(encoder_folder(path))
    job = read_job(find_best(path))
    return job.trained_pooling if isinstance(job, LanguageJob) else None


@dataclass(frozen=True)
class LoadedLanguageModel:
    """A model in evaluation mode (without rows that padded the vocabulary), its tokenizer and its job."""

    checkpoint: Path
    model: CaptModel
    tokenizer: TextTokenizer
    job: LanguageJob
    has_mlm: bool = True
    """False where the masked-language-model head was never trained (a bare encoder from elsewhere)."""
    bottleneck: Bottleneck | None = None
    """The heads of a bottleneck, of a job that trains one."""


def load_model(path: Path) -> LoadedLanguageModel:
    """Load a checkpoint, or the best one of a run (without ``checkpoint.best`` the newest), after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, LanguageJob, "capt_language")
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    # Compilation and recomputation change no result, and serve training alone.
    plain = config.model_copy(update={"compile": False, "activation_checkpointing": "none"})
    module = load_module(checkpoint, "model", lambda: LanguageModule(job, plain))
    return LoadedLanguageModel(checkpoint, unpadded(module.capt).eval(), tokenizer, job, bottleneck=module.bottleneck)


def load_hf(folder: Path) -> LoadedLanguageModel:
    """The masked-language model in ``folder``, in evaluation mode; its windows are as long as its position table.

    It has an aggregation head only where ``capt_head.safetensors`` (our own exports) brings one. Where the folder has
    no masked-language-model head, `LoadedLanguageModel.has_mlm` is false and that of the model holds random weights.

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
    return LoadedLanguageModel(folder, model, source.tokenizer, job, has_mlm=source.has_mlm)


# ``model.init`` of a job that starts from a trained encoder: a run or checkpoint of ours, or a Hugging Face folder.
#
# A weight that the encoder lacks, or that it has no place for, is an error; heads and poolers are left behind.


ENCODER = "encoder.model."
"""Prefix of the encoder's parameters in every checkpoint of fine-tuning and of pairs."""


@dataclass(frozen=True)
class Backbone:
    """A pretrained encoder. ``hf_config``: the keys of a ``config.json`` from which it can be built again."""

    encoder: Encoder
    hf_config: dict[str, Any]
    tokenizer: TextTokenizer


def load_backbone(
    path: Path, *, dropout: float = 0.1, attention_dropout: float = 0.1, allow_missing: bool = False
) -> Backbone:
    """Load the encoder in ``path``, with these dropouts.

    Args:
        path: a run (its best checkpoint, else the newest) or a checkpoint, of ``capt_language``, ``capt_pairs`` or
            fine-tuning; or a Hugging Face folder or hub id of a masked-language model, a classifier or an encoder.
            Heads are left behind.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        allow_missing: warn of weights that are missing (they stay as initialised) or unknown, instead of refusing.

    Raises:
        CheckpointError: nothing usable there, no tokenizer, or weights are missing, unknown or of another shape.
    """
    source, folder = str(path), local_folder(path)
    pretrained = read_encoder(folder) if is_hf(folder) else _read_checkpoint(folder)
    encoder = load_encoder(
        pretrained, source, dropout=dropout, attention_dropout=attention_dropout, allow_missing=allow_missing
    )
    return Backbone(encoder, pretrained.hf_config, pretrained.tokenizer)


def encoder_description(folder: Path) -> dict[str, Any]:
    """The keys of a ``config.json`` that describe the encoder in ``folder``; no weight is read.

    Raises:
        CheckpointError: nothing usable there.
    """
    if is_hf(folder):
        return encoder_keys(read_description(folder)[0])
    checkpoint = find_best(folder)
    job = read_job(checkpoint)
    if isinstance(job, LanguageJob):
        tokenizer = read_tokenizer(checkpoint / "tokenizer", checkpoint)
        config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
        return encoder_keys(config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos))
    if (encoder := job.encoder_config()) is not None:
        return encoder_keys(encoder)
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {job.task.type}; it has no text encoder")


def encoder_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of the encoder in ``folder``. Raises ``CheckpointError`` where it cannot be read."""
    return read_tokenizer(encoder_folder(folder) if is_hf(folder) else find_best(folder) / "tokenizer", folder)


def _read_checkpoint(path: Path) -> PretrainedEncoder:
    """The encoder in a checkpoint of ours, or in the best checkpoint of a run."""
    checkpoint = find_best(path)
    job = read_job(checkpoint)
    model = load_model(checkpoint).model if isinstance(job, LanguageJob) else None  # which verifies every file
    if model is None:
        verify(checkpoint)
    tokenizer = read_tokenizer(checkpoint / "tokenizer", checkpoint)
    if model is not None:
        hf_config = model.config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
        state = dict(model.encoder.state_dict())
        if own_encoder(hf_config) is None:  # a family that is fine-tuned on transformers' model
            named, prefix = to_hf(model.state_dict(), model.config), model.config.hf.prefix
            state = {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}
        return PretrainedEncoder(encoder_keys(hf_config), state, tokenizer)
    if (encoder := job.encoder_config()) is not None:
        weights = read_weights(checkpoint)
        state = {name.removeprefix(ENCODER): x for name, x in weights.items() if name.startswith(ENCODER)}
        if (lora := getattr(getattr(job, "model", None), "lora", None)) is not None:
            state = merged_weights(state, lora)
        return PretrainedEncoder(encoder, state, tokenizer)
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {job.task.type}; it has no text encoder to fine-tune")
