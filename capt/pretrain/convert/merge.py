"""``capt merge``: one model out of several, as a run of ours or a Hugging Face folder; validated as their job does."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, ConfigError, UserError, quoted
from capt.pretrain.base.files import read_bytes, write_json
from capt.pretrain.config.schema import Job
from capt.pretrain.convert.output import export_folder
from capt.pretrain.engine.checkpoint import find_best, load_module_weights, read_job, read_manifest, verify
from capt.pretrain.engine.checkpoint.merge import Method, check_weights, merge_checkpoints, mix
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import CheckedValidation, Progress, to_float
from capt.pretrain.models.hf_folder import (
    BUFFER,
    is_hf,
    read_json,
    read_tensor_file,
    read_tensors,
    require_regular,
)
from capt.pretrain.models.sentence_folder import encoder_folder, modules_of
from capt.pretrain.registry import task_class

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spm.model", "sentencepiece.bpe.model")
_LARGEST = 1 << 30
_FREE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")
"""Keys of ``config.json`` in which models that are merged may differ."""


def command(
    sources: Sequence[Path], out: Path, *, weights: Sequence[float] | None = None, method: Method = "average",
    validate: bool = True,
) -> str:  # fmt: skip
    """Write the mixture of ``sources`` into ``out`` and return how it compares with them, as text.

    Checkpoints of ours are measured before and after on what their job is validated on. Where that is not to be had,
    and for folders of Hugging Face, the text has the commands that measure them.

    Runs (their best checkpoint, else the newest) and checkpoints become a run with a checkpoint at step 0; folders of
    Hugging Face become such a folder, with weights in fp32. The other files, but for a model card, are the first
    source's.

    Raises:
        UserError: the weights do not fit, a source is damaged, or they differ in kind, architecture or vocabulary.
    """
    shares = check_weights(len(sources), weights, method)
    for source in sources:
        if source.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"{out}: the source {source} is in it; give another folder")
    # The two kinds are merged by different readers, so that one of each cannot be.
    of_hf = [is_hf(source) for source in sources]
    if any(of_hf) and not all(of_hf):
        ours = sources[of_hf.index(False)]
        raise ConfigError(
            f"{ours} is not a Hugging Face folder, and {sources[of_hf.index(True)]} is one; make both one kind: "
            f"capt convert {quoted(ours)} OUT --to hf"
        )
    with export_folder(out) as folder:
        if all(of_hf):
            _merge_folders(sources, shares, folder, method)
        else:
            merge_checkpoints([find_best(source) for source in sources], shares, folder, out, method=method)
    # The figures of all, or of none: single ones would not compare.
    figures, why = _validated([*sources, out]) if validate and not any(of_hf) else ([], "")
    if figures:
        return _table([*sources, out], figures)
    task = "capt_language" if any(of_hf) else read_manifest(find_best(out)).task
    given = {"capt_language": " --text HELD_OUT.txt", "capt_pairs": " --data FILE"}
    commands = [f"  capt evaluate {quoted(model)}" + given.get(task, "") for model in (*sources, out)]
    return "\n".join([f"compare it with what it is made of{why}:", *commands])


def _validated(models: Sequence[Path]) -> tuple[list[dict[str, float]], str]:
    """The validation of each model; where one has none, no figures, and why."""
    figures = []
    for model in models:
        try:
            figures.append(validate_checkpoint(find_best(model)))
        except UserError as error:
            return [], f" (not measured here: {error})"
        if not figures[-1]:
            return [], f" (not measured here: the job of {model} has no validation)"
    return figures, ""


def _table(models: Sequence[Path], figures: Sequence[Mapping[str, float]]) -> str:
    """The validations side by side, a metric a line; the last one is the mixture."""
    names = [*(f"before: {model.name}" for model in models[:-1]), f"after: {models[-1].name}"]
    wide = max(map(len, figures[-1]))
    lines = ["  ".join([" " * wide, *names])]
    for metric in figures[-1]:
        values = (f"{each.get(metric, math.nan):.5g}" for each in figures)
        cells = [value.rjust(len(name)) for value, name in zip(values, names, strict=True)]
        lines.append("  ".join([metric.ljust(wide), *cells]))
    return "\n".join(lines)


_OTHER_WEIGHTS = (".bin", ".pt", ".onnx", ".h5", ".msgpack", ".ot", ".gguf")
"""Weights in other forms, which are of one source alone."""


def other_files(folder: Path, place: Path) -> Iterator[Path]:
    """Yield what lies in a Hugging Face folder beside the weights and the ``config.json`` of its encoder in ``place``.

    A model card and weights in other forms are left out: they are of that model alone.
    """
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in inner.parts) or path.suffix in _OTHER_WEIGHTS:
            continue
        # The weights in one file or in shards.
        is_model = re.fullmatch(r"model(-\d+-of-\d+)?\..*", path.name) is not None
        if not (inner.parent == place and (is_model or path.name in ("config.json", "README.md"))):
            require_regular(path)
            yield inner


def _merge_folders(sources: Sequence[Path], shares: Sequence[float], out: Path, method: Method) -> None:
    first = sources[0]
    # A folder of sentence-transformers may have its encoder in a folder within.
    encoder = encoder_folder(first)
    place = encoder.relative_to(first)
    config = read_json(encoder / "config.json")
    for other in sources[1:]:
        _require_alike(first, config, other)
    tensors = [read_tensors(encoder_folder(source)) for source in sources]
    (out / place).mkdir(parents=True, exist_ok=True)
    write_tensors(out / place / "model.safetensors", _mixed(sources, tensors, shares, method), {"format": "pt"})
    # The tensors are as large as the models; files that are copied need them no more.
    del tensors
    for inner in other_files(first, place):
        path = first / inner
        (out / inner).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":  # a head beside the encoder
            heads = [read_tensor_file(source / inner) for source in sources]
            write_tensors(out / inner, _mixed(sources, heads, shares, method), _metadata(path))
        else:
            shutil.copyfile(path, out / inner)
    # Averages are in fp32, whatever the sources were.
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    write_json(out / place / "config.json", {**kept, "dtype": "float32"})


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _mixed(
    sources: Sequence[Path], each: Sequence[Mapping[str, Tensor]], shares: Sequence[float], method: Method
) -> dict[str, Tensor]:
    # Buffers are position numbers and the like, and not weights.
    each = [{name: has[name] for name in has if not BUFFER.fullmatch(name)} for has in each]
    first = each[0]
    for source, tensors in zip(sources[1:], each[1:], strict=True):
        for name in sorted(first.keys() | tensors.keys()):
            shapes = [list(has[name].shape) if name in has else None for has in (tensors, first)]
            if shapes[0] != shapes[1]:
                listed = [f"shape {shape}" if shape is not None else "no such tensor" for shape in shapes]
                raise CheckpointError(f"{source}: {name} has {listed[0]}, in {sources[0]} it has {listed[1]}")
    return {
        name: mix([has[name] for has in each], shares, method) if tensor.is_floating_point() else tensor
        for name, tensor in first.items()
    }


def _require_alike(one: Path, config: Mapping[str, Any], source: Path) -> None:
    other = read_json(encoder_folder(source) / "config.json")
    defaults = _defaults(config.get("model_type"))
    # With the defaults of the family a key may be missing on one side, else it must be on both.
    known = config.keys() & other.keys() if defaults else config.keys() | other.keys()
    for key in sorted(known | defaults.keys()):
        values = [has.get(key, defaults.get(key)) for has in (other, config)]
        if key not in _FREE and values[0] != values[1]:
            raise CheckpointError(f"{source}: config.json has {key} {values[0]!r}, {one} has {values[1]!r}")
    # Behind the same encoder another pooling makes other vectors.
    if (
        (one / "modules.json").exists()
        and (source / "modules.json").exists()
        and _later_modules(one) != _later_modules(source)
    ):
        raise CheckpointError(f"{source}: pools otherwise than {one}, or has other modules, so its vectors are others")
    one, source = encoder_folder(one), encoder_folder(source)
    here, there = ({name for name in _VOCABULARIES if (folder / name).exists()} for folder in (one, source))
    if (here or there) and not here & there:
        raise CheckpointError(f"{source}: no file of its vocabulary has the name of one in {one}, to compare them")
    for name in sorted(here & there):
        if _vocabulary(source / name) != _vocabulary(one / name):
            raise CheckpointError(f"{source}: {name} is another vocabulary than that of {one}")


def _defaults(model_type: object) -> Mapping[str, Any]:
    """Return the values of transformers for keys that a ``config.json`` lacks: releases write more or fewer."""
    from transformers import CONFIG_MAPPING

    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    return CONFIG_MAPPING[model_type]().to_dict() if known else {}


def _later_modules(folder: Path) -> list[tuple[str, object]]:
    """The modules of a sentence-transformers folder behind its encoder, in the words of any release of that library."""
    found: list[tuple[str, object]] = []
    # The first module is the encoder, whose files are compared by themselves.
    for kind, name in modules_of(folder)[1:]:
        path = folder / name / "config.json"
        config = read_json(path) if path.exists() else {}
        found.append((kind, _pooling(config) if kind == "Pooling" else config))
    return found


def _pooling(config: Mapping[str, Any]) -> tuple[set[str], bool]:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes += [str(config["pooling_mode"])] if "pooling_mode" in config else []
    # `mean_tokens` and `mean`, `lasttoken` and `last`: both generations have one word for a mode.
    names = {re.sub("_?tokens?$", "", mode.removeprefix("pooling_mode_")) for mode in modes}
    return names, config.get("include_prompt", True)


def _vocabulary(path: Path) -> object:
    """Return what tells a vocabulary from others; of ``tokenizer.json`` the pieces with their ids."""
    content = read_bytes(path, limit=_LARGEST, error=CheckpointError)
    if path.name != "tokenizer.json":
        return hashlib.sha256(content).digest()
    try:
        tokenizer = json.loads(content)
        return tokenizer["model"]["vocab"], [(each["id"], each["content"]) for each in tokenizer["added_tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: not a tokenizer of Hugging Face") from None


def validate_checkpoint(checkpoint: Path) -> dict[str, float]:
    """Return what the job's own validation reports of the weights of ``checkpoint``; empty where it has none.

    The data are those of the job, prepared again where they are not in its cache.

    Raises:
        UserError: they are not there any more, or are no more what they were; or the checkpoint is damaged.
    """
    verify(checkpoint)
    progress = read_manifest(checkpoint).progress
    with tempfile.TemporaryDirectory() as scratch:
        # Into a scratch folder: the validation of a run must not write into it.
        job = _alone(read_job(checkpoint), checkpoint, Path(scratch))
        task = task_class(job.task.type)(job, job.run.dir)
        if isinstance(task, CheckedValidation) and task.validation_fault():
            return {}
        modules = task.build_modules()
        for name, module in modules.items():
            load_module_weights(checkpoint, name, module)
        engines = build_engines(modules, task.job, task.optimizers())
        for engine in engines.values():
            engine.eval()
        report = task.validate(engines, Progress(progress.step, progress.samples, progress.tokens))
    return {name: to_float(value) for name, value in report.items()}


def _alone(job: Job, checkpoint: Path, scratch: Path) -> Job:
    """The job on one rank, with the tokenizer of the checkpoint, writing into ``scratch``."""
    update: dict[str, object] = {
        "run": job.run.model_copy(update={"dir": scratch, "branch_from": None}),
        "engine": type(job.engine)(zero_stage=0),
        "batch": job.batch.model_copy(update={"micro": None, "ramp": []}),
    }
    tokenizer = getattr(job, "tokenizer", None)
    if tokenizer is not None and (checkpoint / "tokenizer").is_dir():
        update["tokenizer"] = tokenizer.model_copy(update={"path": checkpoint / "tokenizer"})
    return job.model_copy(update=update)
