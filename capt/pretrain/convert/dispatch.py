"""``capt convert`` as a function of folders: the task of the checkpoint writes, or reads a foreign model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import ConfigError, did_you_mean, quoted
from capt.pretrain.commands import accepted_options, command_module, task_of
from capt.pretrain.convert.card import About
from capt.pretrain.convert.output import refuse_existing
from capt.pretrain.models.architecture import model_types
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.registry import IMPORTERS, task_module

logger = logging.getLogger(__name__)


def convert(
    source: Path,
    out: Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    overwrite: bool = False,
    about: About | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> Path:
    """Write the folder (for word vectors the file) ``out``, checked against our own model, and return it.

    Args:
        source: a checkpoint, a run, or a file of word vectors, with ``to``; a foreign folder or hub id with ``from_``.
        out: a folder that does not exist or is empty; for word vectors a file that does not exist.
        to: one of ``TARGETS`` of the ``export`` module of the checkpoint's task.
        from_: a key of `capt.pretrain.registry.IMPORTERS`: ``hf`` (an encoder's folder becomes a run at step 0).
        overwrite: replace ``out`` if it is an older export.
        about: what the model card says beyond what the run knows.
        assignments: options of the task's own, ``NAME=VALUE`` each.
        options: other options of the task's export; None = not given.

    Raises:
        UserError: one line saying what is wrong with the arguments, ``source`` or ``out``; nothing is written then.
    """
    if (to is None) == (from_ is None):
        raise ConfigError("give either --to (what to make of a checkpoint) or --from (what to make a checkpoint of)")
    if from_ is not None:
        _require_importer(from_, [*(name for name, value in options.items() if value is not None), *assignments])
    # An export into a folder that holds its source would replace it.
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out}: the source {source} is in it; give another folder")
    if from_ is not None:
        refuse_existing(out, overwrite=overwrite)
        importer = task_module(IMPORTERS[from_], f"import_{from_}")
        assert importer is not None, "IMPORTERS names tasks that have it"
        importer.command(source, out, overwrite=overwrite)
        logger.info("train on it with: capt resume %s data.files=FILE", quoted(out))
        return out
    assert to is not None
    if is_hf(source):
        raise ConfigError(
            f"{source}: a Hugging Face folder, and --to is for checkpoints of ours: train one with it as model.init, "
            f"or take it over with --from hf (of a model_type that can be pretrained: {', '.join(model_types())})"
        )
    task = task_of(source)
    export = command_module(source, task, "export")
    targets = export.targets(source) if hasattr(export, "targets") else export.TARGETS
    if to not in targets:
        known = did_you_mean(to, targets, f"a checkpoint of task {task} can be written as")
        raise ConfigError(f"--to {to!r} is unknown; {known}")
    # A task whose export is a file, as word vectors are, has a check of its own.
    getattr(export, "require_free", refuse_existing)(out, overwrite=overwrite)
    given = accepted_options(export.command, task, options, assignments)
    export.command(source, out, to=to, overwrite=overwrite, about=about, **given)
    return out


def _require_importer(name: str, options: Sequence[str]) -> None:
    if name not in IMPORTERS:
        raise ConfigError(f"--from {name!r} is unknown; {did_you_mean(name, sorted(IMPORTERS), 'valid:')}")
    if options:
        raise ConfigError(f"--{options[0]} has no meaning with --from {name}")
