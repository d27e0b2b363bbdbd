"""A trained model of pairs back from a checkpoint, and how a model to start from pools its texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, did_you_mean, shown
from capt.pretrain.base.randomness import derive
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint, read_job
from capt.pretrain.language.load import Backbone, trained_pooling
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.hf_config import SENTENCE_FILES, local_folder
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.models.lora import merge_lora
from capt.pretrain.models.sentence_folder import encoder_folder, modules_of, pooling_file, poolings
from capt.pretrain.pairs.config import PairJob, PairModel, Pooling
from capt.pretrain.pairs.data_config import PairData, Prompts
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.representations import module_of
from capt.pretrain.pairs.sources import LENGTH, longest_text
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
"""Ways of pooling by their names in old and new releases of sentence-transformers."""


@dataclass(frozen=True)
class LoadedPairModel:
    """A model in evaluation mode, its tokenizer and its job."""

    checkpoint: Path
    model: PairModule
    tokenizer: TextTokenizer
    job: PairJob

    def reading(self, source: str | None = None) -> SourceReading:
        """Return the settings for reading the texts of a source; see `reading`."""
        return reading(self.job, self.tokenizer, self.model.encoder.model.max_positions, source)


class SourceReading(NamedTuple):
    """The prompts of a source, and the tokens of its queries and documents at most, prompts included."""

    prompts: Prompts
    query_length: int
    document_length: int


def reading(job: PairJob, tokenizer: TextTokenizer, max_positions: int, source: str | None = None) -> SourceReading:
    """Return the settings for reading the texts of the source ``source``; None = the one with the largest weight.

    Raises:
        ConfigError: there is no such source, or its lengths do not fit the encoder.
    """
    sources = {each.name: each for each in job.data.each()}
    if source is None:
        source = max(sources, key=lambda each: sources[each].weight)
        if len({each.prompts for each in sources.values()}) > 1:
            logger.warning("the prompts are those of source %s; --option source=NAME chooses another one", source)
    if source not in sources:
        raise ConfigError(f"--option source={source}: no such source; {did_you_mean(source, sorted(sources))}")
    chosen = sources[source]
    sides = ((chosen.prompts.query, chosen.query_length), (chosen.prompts.document, chosen.document_length))
    what, own = f"source {source}", chosen.own_length
    lengths = [longest_text(tokenizer, prompt, length, max_positions, what, own) for prompt, length in sides]
    return SourceReading(chosen.prompts, *lengths)


def load_model(path: Path) -> LoadedPairModel:
    """Load a checkpoint, or the best or newest one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, PairJob, "capt_pairs")
    model = load_module(checkpoint, "model", lambda: _build(job, checkpoint))
    # Evaluation and export know plain encoders alone.
    if job.model.lora is not None:
        merge_lora(model.encoder.model)
    return LoadedPairModel(checkpoint, model.eval(), load_tokenizer(checkpoint / "tokenizer"), job)


def _build(job: PairJob, checkpoint: Path) -> PairModule:
    section = job.model
    if section.encoder is None or section.pooling == "auto":
        raise CheckpointError(
            f"{checkpoint / 'config.yaml'}: model.encoder or model.pooling is not set; every checkpoint of capt_pairs "
            "has them"
        )
    encoder = build_encoder(
        section.encoder,
        dropout=section.dropout,
        attention_dropout=section.attention_dropout,
        source=str(checkpoint),
    )
    model: PairModule = module_of(job)(job, encoder, section.pooling)
    return model


def pooling_of_init(init: Path) -> Pooling:
    """Return the pooling of the model that ``model.init`` names: as it was trained, where it says so, else the mean.

    Raises:
        CheckpointError: it pools in a way that is not known here.
    """
    folder = local_folder(init, SENTENCE_FILES)
    if is_hf(folder):
        return pooling_of_folder(folder) or trained_pooling(folder) or "mean"
    job = read_job(find_best(folder))
    if isinstance(job, PairJob) and job.model.pooling != "auto":
        return job.model.pooling
    return trained_pooling(folder) or "mean"


def with_own_length(job: PairJob, max_positions: int) -> PairJob:
    """Fill in ``data.own_length`` where ``data.sequence_length`` asks for what the encoder reads."""
    if job.data.sequence_length != "encoder" or job.data.own_length is not None:
        return job
    data = job.data.model_copy(update={"own_length": own_length(job.model.init, max_positions)})
    return job.model_copy(update={"data": data})


def own_length(init: Path, max_positions: int) -> int:
    """Return the tokens of a text that the model which ``model.init`` names reads.

    A sentence-transformers folder says it, and a run has been trained on it; of another encoder it is what its
    positions leave, 512 at most.
    """
    folder = local_folder(init, SENTENCE_FILES)
    length: int | None = None
    if is_hf(folder):
        path = encoder_folder(folder) / "sentence_bert_config.json"
        length = read_json(path).get("max_seq_length") if path.is_file() else None
    else:
        data = getattr(read_job(find_best(folder)), "data", None)
        asked = [getattr(data, name, None) for name in ("sequence_length", "own_length")]
        length = next((value for value in asked if isinstance(value, int)), LENGTH if asked == [None, None] else None)
    return min(length if isinstance(length, int) and length >= 8 else _LONGEST, max_positions)


def with_random_weights(init: Backbone, section: PairModel, seed: int) -> Backbone:
    """Return the model with fresh weights, drawn by the seed, in the place of those of ``model.init``."""
    if distributed.rank() == 0:
        logger.warning(
            "model.random: training begins with random weights; of distillation from such a start (65M parameters, "
            "5M texts) a cosine of 0.77 to the teacher and 0.09 nDCG@10 on NFCorpus are known: capt shrink TEACHER "
            "STUDENT --layers 0,-1 makes a nearer start"
        )
    torch.manual_seed(derive(seed, "init"))
    encoder = build_encoder(
        init.hf_config, dropout=section.dropout, attention_dropout=section.attention_dropout, source=str(section.init)
    )
    return replace(init, encoder=encoder)


_LONGEST = 512
"""Tokens of a text where the encoder does not say how many it reads; texts of thousands are to be asked for."""


def pooling_of_folder(folder: Path) -> Pooling | None:
    """Return how sentence-transformers pools the encoder in ``folder``; None where the folder does not say.

    Raises:
        CheckpointError: it pools in a way that is not known here, or `pooling_file` refuses it.
    """
    path = pooling_file(folder)
    if path is None:
        return None
    config = read_json(path)
    # Newer releases write one key, older ones a flag for each way.
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        named = list(map(str, modes if isinstance(modes, list) else [modes]))
    else:
        named = [name for name, chosen in config.items() if name.startswith("pooling_mode_") and chosen is True]
    if len(named) == 1 and (mode := _MODES.get(named[0])) is not None:
        return mode
    raise CheckpointError(f"{path}: pools by {shown(named)}; set model.pooling to mean, cls or last")


_TAKEN = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that a model of pairs has as well."""


def left_behind(init: Path, data: PairData) -> list[str]:
    """List what the sentence-transformers folder ``init`` does to a text and a model that starts from it does not."""
    folder = local_folder(init, SENTENCE_FILES)
    said = []
    modules = modules_of(folder) if (folder / "modules.json").is_file() else []
    if others := [kind for kind, _ in modules if kind not in _TAKEN]:
        said.append(f"{', '.join(map(shown, others))}: the vectors begin as those of encoder and pooling alone")
    if any(path.is_file() and read_json(path).get("include_prompt") is False for path in poolings(folder)):
        said.append("include_prompt false: here the tokens of a prompt are pooled with the text")
    path = folder / "config_sentence_transformers.json"
    settings = read_json(path) if path.is_file() else {}
    similarity, width, prompts = (settings.get(key) for key in ("similarity_fn_name", "truncate_dim", "prompts"))
    if similarity not in (None, "cosine"):
        said.append(f"similarity_fn_name {shown(similarity)}: pairs are compared by their cosine here")
    if width is not None:
        said.append(f"truncate_dim {shown(width)}: vectors have all dimensions of the encoder here")
    own = [source.prompts for source in data.each()]
    if isinstance(prompts, dict) and any(prompts.values()) and not any(each.query or each.document for each in own):
        named = ", ".join(f"{name} {shown(text)}" for name, text in prompts.items() if text)
        said.append(f"its prompts ({named}): data.prompts.query and data.prompts.document set them")
    return [f"{init} is not taken over as a whole: {each}" for each in said]
