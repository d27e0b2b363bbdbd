"""Hugging Face RoBERTa or XLM-R folder -> a run that ``capt resume`` continues, from weights alone, at step 0."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import safe_open

from pretrain.config.load import job_from_mapping
from pretrain.convert.hf_folder import read_config, read_json, read_tensor_file, read_tensors
from pretrain.convert.huggingface import HEAD_FILE
from pretrain.convert.output import new_folder
from pretrain.engine.checkpoint.layout import CONFIG, step_folder
from pretrain.engine.checkpoint.save import config_text, partial_folder, write_weights_only
from pretrain.engine.seeding import derive
from pretrain.language.config import LanguageJob
from pretrain.language.module import LanguageModule
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_map import initialise_from_hf
from tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def import_hf(folder: Path, out: Path, *, overwrite: bool = False) -> None:
    """Make the run ``out`` from the masked-language model in ``folder``: its weights at step 0, and its tokenizer.

    The aggregation head is that of ``capt_head.safetensors`` (our own exports have it), else freshly initialised.
    ``out/config.yaml`` is a ``capt_language`` job with default hyper-parameters, to be overridden on the command line.
    Nothing in ``folder`` is run or followed; see :mod:`pretrain.convert.hf_folder`.

    Raises:
        CheckpointError: ``folder`` is not such a model, is damaged or hostile, or ``out`` is taken.
        DataError: its tokenizer cannot be read.
        ConfigError: tokenizer and model do not fit.
    """
    described = read_config(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            read_json(folder / name)
    tokenizer = load_tokenizer(folder)
    head_file = folder / HEAD_FILE
    head = read_tensor_file(head_file) if head_file.exists() else None
    config = RobertaConfig.from_hf(described).for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if head is not None:
        with safe_open(head_file, framework="pt") as file:
            config = config.model_copy(update={"pooling": (file.metadata() or {}).get("pooling", "cls")})
    job = _job(config, out.absolute())
    torch.manual_seed(derive(job.run.seed, "init"))
    module = LanguageModule(job, config)
    initialise_from_hf(module.capt, config, described, read_tensors(folder), head, str(folder))
    if head is None:
        logger.warning("%s has no %s: the aggregation head starts from random weights", folder, HEAD_FILE)
    with new_folder(out, overwrite=overwrite) as run:
        _write_run(run, job, module, tokenizer)


def _job(config: RobertaConfig, out: Path) -> LanguageJob:
    mapping = {
        "task": {"type": "capt_language"},
        "run": {"dir": str(out)},
        "data": {"sequence_length": config.max_positions},
        "tokenizer": {"path": str(out / "tokenizer")},
        "model": config.model_dump(mode="json", by_alias=True),
    }
    job = job_from_mapping(mapping, str(out))
    assert isinstance(job, LanguageJob)
    return job


def _write_run(run: Path, job: LanguageJob, module: LanguageModule, tokenizer: TextTokenizer) -> None:
    target = step_folder(run, 0)
    inside = partial_folder(target) / "tokenizer"
    for folder in (run / "tokenizer", inside):
        folder.mkdir(parents=True)
        tokenizer.save(folder, model_max_length=job.model.max_positions)
    (run / CONFIG).write_text(config_text(job), encoding="utf-8")
    write_weights_only(target, job, {"model": module}, {"tokenizer": tokenizer.fingerprint, "queue": 0})
