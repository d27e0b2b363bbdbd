"""Mixes the weights of several checkpoints into one that evaluates, exports and starts other runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.base.files import write_text
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine.checkpoint.layout import CONFIG, STATE, Manifest, read_job, read_metadata, verify
from capt.pretrain.engine.checkpoint.load import stored_weights
from capt.pretrain.engine.checkpoint.save import partial_folder, write_weights
from capt.pretrain.engine.step_folders import MANIFEST, step_folder

Method = Literal["average", "slerp"]

_PARALLEL = 1e-6
"""Sine of the angle below which two tensors are mixed along the line between them, and not along the arc."""


def check_weights(count: int, weights: Sequence[float] | None, method: Method) -> list[float]:
    """Return the share of each of ``count`` models, equal ones where none are given.

    Raises:
        ConfigError: their number is another one, they do not add up to 1, or slerp is asked of other than two models.
    """
    if count < 2:
        raise ConfigError(f"a merge needs two models or more, not {count}")
    shares = [1 / count] * count if weights is None else list(weights)
    if len(shares) != count:
        raise ConfigError(f"--weights names {len(shares)} shares of {count} models; give one for each, as 0.7,0.3")
    if not abs(sum(shares) - 1) <= 1e-6:  # NaN included
        raise ConfigError(f"--weights add up to {sum(shares):g}, not to 1")
    if method == "slerp" and count != 2:
        raise ConfigError(f"--method slerp goes along the arc between two models, not {count}; use average")
    return shares


def mix(tensors: Sequence[Tensor], shares: Sequence[float], method: Method = "average") -> Tensor:
    r"""Return the mixture of tensors of one shape, computed in float64.

    ``average``: :math:`\sum_i c_i w_i` (Wortsman et al. 2022, model soups). ``slerp`` (Shoemake 1985), for two, with
    the angle :math:`\omega` between them as vectors:
    :math:`(\sin(c_1\omega)\, w_1 + \sin(c_2\omega)\, w_2) / \sin\omega`; parallel ones are averaged.
    """
    exact = [tensor.double() for tensor in tensors]
    if method == "slerp":
        a, b = (tensor / tensor.norm().clamp_min(1e-300) for tensor in exact)
        omega = torch.acos((a * b).sum().clamp(-1.0, 1.0))
        if omega.sin().abs() > _PARALLEL:
            shares = [float((share * omega).sin() / omega.sin()) for share in shares]
    mixed = torch.zeros_like(exact[0])
    for share, tensor in zip(shares, exact, strict=True):
        mixed += share * tensor
    return mixed.float()


def merge_checkpoints(
    sources: Sequence[Path], shares: Sequence[float], run: Path, out: Path, *, method: Method = "average",
    average: bool = False,
) -> Path:  # fmt: skip
    """Write ``run``, the folder of a run with the mixture as its checkpoint at step 0, and return that checkpoint.

    Job, tokenizer and the other files are those of the first source. A tied matrix is mixed once.

    Args:
        sources: checkpoints.
        shares: of each.
        run: an empty folder.
        out: what it will be renamed to.
        method: how tensors are mixed.
        average: mix the averages that the optimizer keeps (``checkpoint.ema``), not the weights.

    Raises:
        CheckpointError: one is damaged, or of another task, architecture or tokenizer than the first.
    """
    # Every byte of every source is verified before anything is written.
    manifests = [verify(source) for source in sources]
    if any(".lora_A." in name for module in manifests[0].modules.values() for name in module.shapes):
        raise CheckpointError(
            f"{sources[0]}: has adapters (model.lora), and the mean of products is not the product of means; export "
            "each run with capt convert, then merge the folders"
        )
    first, state = manifests[0], read_metadata(sources[0]).task
    for source, manifest in zip(sources[1:], manifests[1:], strict=True):
        _require_alike(sources[0], first, state, source, manifest)
    # Everything but weights and state is the first source's: tokenizer, answers, and the like.
    target = step_folder(run, 0)
    partial = partial_folder(target)
    own = [name for name in first.files if not name.endswith(".safetensors") and name not in (CONFIG, STATE, MANIFEST)]
    partial.mkdir(parents=True)
    for name in own:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources[0] / name, partial / name)
    weights: dict[str, Mapping[str, Tensor]] = {}
    # One module at a time in memory, read tensor by tensor from all sources.
    for module in first.modules:
        with ExitStack() as stack:
            opened = [stack.enter_context(stored_weights(source, module, average=average)) for source in sources]
            weights[module] = {
                name: mix([read(name) for _, read in opened], shares, method) for name in first.modules[module].shapes
            }
    # The mixture is step 0 of a new run: without moments, and with an empty queue.
    job = read_job(sources[0])
    settings = job.run.model_copy(update={"dir": out.absolute(), "branch_from": None})
    job = job.model_copy(update={"run": settings})
    write_text(run / CONFIG, job_to_yaml(job))
    task: dict[str, Any] = {**state, **({"queue": 0} if "queue" in state else {})}
    described = {name: module.model_dump() for name, module in first.modules.items()}
    return write_weights(target, job, described, weights, task)


def _require_alike(one: Path, first: Manifest, state: Mapping[str, Any], source: Path, manifest: Manifest) -> None:
    if manifest.task != first.task:
        raise CheckpointError(f"{source}: of task {manifest.task}, and {one} of {first.task}; merge models of one task")
    if manifest.modules.keys() != first.modules.keys():
        raise CheckpointError(f"{source}: holds {', '.join(manifest.modules)}, and {one} {', '.join(first.modules)}")
    for name, module in first.modules.items():
        other = manifest.modules[name]
        for parameter in sorted(module.shapes.keys() | other.shapes.keys()):
            shapes = [each.shapes.get(parameter) for each in (other, module)]
            if shapes[0] is None or shapes[1] is None:
                has, lacks = (one, source) if shapes[0] is None else (source, one)
                raise CheckpointError(f"{lacks}: no {parameter}, which {has} has; merge models of one architecture")
            if shapes[0] != shapes[1]:
                raise CheckpointError(
                    f"{source}: {parameter} has shape {shapes[0]}, in {one} it has shape {shapes[1]}; merge models of "
                    "one architecture"
                )
        if other.ties != module.ties:
            raise CheckpointError(f"{source}: ties other parameters together than {one}")
    tokenizers = [str(each.get("tokenizer", "")) for each in (read_metadata(source).task, state)]
    if tokenizers[0] != tokenizers[1]:
        raise CheckpointError(
            f"{source}: trained with tokenizer {tokenizers[0][:12]}, {one} with {tokenizers[1][:12]}; merge models of "
            "one vocabulary"
        )
