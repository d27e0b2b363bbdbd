"""Hugging Face folder of an encoder -> a run that ``capt resume`` continues, from weights alone, at step 0."""

from __future__ import annotations

from pathlib import Path

import torch

from capt.pretrain.base.files import write_json
from capt.pretrain.base.randomness import derive
from capt.pretrain.config.load import job_from_mapping, load_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.convert.card import IMPORTED
from capt.pretrain.convert.output import export_folder
from capt.pretrain.engine.checkpoint.save import partial_folder, write_weights_only
from capt.pretrain.engine.run_folder import CONFIG
from capt.pretrain.engine.step_folders import step_folder
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.module import LanguageModule
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.hf_config import local_folder, origin
from capt.pretrain.models.hf_model import read_hf, start_from
from capt.tokenizer.encode import TextTokenizer

RECIPE = "capt_continue"
"""The shipped job whose hyper-parameters an imported model gets: those of continued pretraining."""


def command(source: Path, out: Path, *, overwrite: bool = False) -> None:
    """Make the run ``out`` of a pretrained encoder: its weights at step 0, and its tokenizer.

    The aggregation head is that of ``capt_head.safetensors`` (our own exports have it), else freshly initialised; so is
    the masked-language-model head of a bare encoder. ``out/config.yaml`` is the shipped job ``capt_continue`` with the
    model's sizes, to be overridden on the command line. Nothing in ``source``, a folder or a hub id, is run or
    followed; see :mod:`capt.pretrain.models.hf_folder`.

    Raises:
        UserError: as :func:`capt.pretrain.models.hf_model.read_hf` does, a tensor has the wrong shape, or ``out`` is
        taken.
    """
    folder = local_folder(source)
    imported = read_hf(folder)
    job = _job(imported.config, out.absolute())
    # The heads that the folder lacks are drawn from the seed of the job.
    torch.manual_seed(derive(job.run.seed, "init"))
    module = LanguageModule(job, imported.config)
    start_from(module.capt, imported, str(source))
    with export_folder(out, overwrite=overwrite) as run:
        write_json(run / IMPORTED, {"source": origin(source, folder)})
        _write_run(run, job, module, imported.tokenizer)


def _job(config: EncoderConfig, out: Path) -> LanguageJob:
    mapping = load_mapping(RECIPE)
    length = min(mapping["data"]["sequence_length"], config.max_positions)
    mapping["run"]["dir"] = str(out)
    mapping["data"]["sequence_length"] = length
    mapping["tokenizer"] = {"path": str(out / "tokenizer")}
    mapping["model"] = config.model_dump(mode="json", by_alias=True)
    job = job_from_mapping(mapping, str(out))
    assert isinstance(job, LanguageJob)
    return job


def _write_run(run: Path, job: LanguageJob, module: LanguageModule, tokenizer: TextTokenizer) -> None:
    target = step_folder(run, 0)
    # The run's own copy outlives the checkpoint, which training removes once it has newer ones.
    for folder in (run / "tokenizer", partial_folder(target) / "tokenizer"):
        folder.mkdir(parents=True)
        tokenizer.save(folder, model_max_length=job.model.max_positions)
    (run / CONFIG).write_text(job_to_yaml(job), encoding="utf-8")
    write_weights_only(target, job, {"model": module}, {"tokenizer": tokenizer.fingerprint, "queue": 0})
