"""Hugging Face RoBERTa or XLM-R folder -> a run that ``capt resume`` continues, from weights alone, at step 0."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from pretrain.config.load import job_from_mapping
from pretrain.convert.output import new_folder
from pretrain.engine.checkpoint.layout import step_folder
from pretrain.engine.checkpoint.manifest import CONFIG
from pretrain.engine.checkpoint.save import config_text, partial_folder, write_weights_only
from pretrain.engine.seeding import derive
from pretrain.language.config import LanguageJob
from pretrain.language.from_hf import read_hf
from pretrain.language.module import LanguageModule
from pretrain.models.build import load_weights
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_map import HEAD, HEAD_FILE
from tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


def import_hf(folder: Path, out: Path, *, overwrite: bool = False) -> None:
    """Make the run ``out`` from the masked-language model in ``folder``: its weights at step 0, and its tokenizer.

    The aggregation head is that of ``capt_head.safetensors`` (our own exports have it), else freshly initialised.
    ``out/config.yaml`` is a ``capt_language`` job with default hyper-parameters, to be overridden on the command line.
    Nothing in ``folder`` is run or followed; see :mod:`pretrain.models.hf_folder`.

    Raises:
        UserError: as :func:`pretrain.language.from_hf.read_hf` does, a tensor has the wrong shape, or ``out`` is taken.
    """
    found = read_hf(folder)
    job = _job(found.config, out.absolute())
    torch.manual_seed(derive(job.run.seed, "init"))
    module = LanguageModule(job, found.config)
    state = found.state
    if not found.has_head:
        logger.warning("%s has no %s: the aggregation head starts from random weights", folder, HEAD_FILE)
        state |= {name: tensor for name, tensor in module.capt.state_dict().items() if name.startswith(HEAD)}
    load_weights(module.capt, state, str(folder))
    with new_folder(out, overwrite=overwrite) as run:
        _write_run(run, job, module, found.tokenizer)


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
    # The run's own copy outlives the checkpoint, which training removes once it has newer ones.
    for folder in (run / "tokenizer", partial_folder(target) / "tokenizer"):
        folder.mkdir(parents=True)
        tokenizer.save(folder, model_max_length=job.model.max_positions)
    (run / CONFIG).write_text(config_text(job), encoding="utf-8")
    write_weights_only(target, job, {"model": module}, {"tokenizer": tokenizer.fingerprint, "queue": 0})
