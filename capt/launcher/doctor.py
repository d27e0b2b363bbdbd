"""``capt doctor``: what this machine offers a run, and what to do about what is missing."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from capt.launcher import machine
from capt.launcher.preflight import limits, probe
from capt.launcher.preflight.report import Check, Level
from capt.pretrain.base.cache import default_cache, require_cache
from capt.pretrain.base.errors import DataError, how_to_install
from capt.pretrain.base.process import host_memory, usable_cores

DISTRIBUTION = "capt-pretraining"
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "sentencepiece", "tokenizers", "fairscale", "ray")
_SHM_MIN = 512 << 20
_DISK_MIN = 10 << 30


def examine(folder: Path) -> list[Check]:
    """All checks, with ``folder`` as the place where runs are going to be written."""
    groups = (
        _host(folder),
        _packages(),
        _apex(sys.path),
        _devices(),
        _operators(),
        _network(),
    )
    return [check for group in groups for check in group]


def _host(folder: Path) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Check("processors", "ok", f"{usable_cores()} cores, {host_memory() / 2**30:.0f} GiB memory")
    free = shutil.disk_usage(folder).free
    advice = "checkpoints of a large model take gigabytes each: set run.dir on a larger disk"
    yield _bounded("disk", free, _DISK_MIN, f"{free / 2**30:.0f} GiB free at {folder.resolve()}", advice)
    yield _cache(default_cache())
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    advice = "NCCL and data workers need more: docker run --ipc=host, or --shm-size=16g"
    yield _bounded("shared memory", size, _SHM_MIN, f"/dev/shm has {size / 2**20:.0f} MiB", advice)


def _cache(folder: Path) -> Check:
    try:
        require_cache(folder)
    except DataError as error:
        finding, _, advice = str(error).partition("; ")
        return Check("cache", "warn", finding, advice)
    return Check("cache", "ok", f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free")


def _bounded(name: str, value: int, least: int, finding: str, advice: str) -> Check:
    return Check(name, "ok", finding) if value >= least else Check(name, "warn", finding, advice)


def _packages() -> Iterator[Check]:
    ranges, extras = _requirements()
    for name in _PACKAGES:
        extra = extras.get(name, "models")
        try:
            installed = version(name)
        except PackageNotFoundError:
            levels: dict[str, Level] = {"models": "fail", "train": "warn"}  # a search needs no trainer
            level = levels.get(extra, "note")
            yield Check(name, level, "not installed", how_to_install(extra))
            continue
        if name in ranges and not ranges[name].contains(installed, prereleases=True):
            advice = "resume and export are tested with the releases of constraints.txt"
            yield Check(name, "warn", f"{installed}, this release takes {ranges[name]}", advice)
        else:
            yield Check(name, "ok", installed)


def _requirements() -> tuple[dict[str, SpecifierSet], dict[str, str]]:
    """The releases that are taken of each package, and the extra that it belongs to."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # run from a source checkout that is not installed
        return {}, {}
    wanted = [Requirement(line) for line in lines]
    extras = {one.name: re.search(r"extra == [\"']([^\"']+)", str(one.marker)) for one in wanted if one.marker}
    return {one.name: one.specifier for one in wanted}, {name: match[1] for name, match in extras.items() if match}


def _apex(path: Sequence[str]) -> Iterator[Check]:
    kind, place = probe.apex(path)
    if kind == "absent":
        yield Check("apex", "note", "absent; torch's and DeepSpeed's fused optimizers are used")
    elif kind == "plain":
        advice = "rebuild it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1; until then its fused optimizers are not used"
        yield Check("apex", "warn", f"{place} has no compiled kernels (amp_C)", advice)
    elif kind == "compiled":
        yield Check("apex", "ok", f"{place}, with compiled kernels")
    else:
        yield from limits.apex(kind, place)


def _devices() -> Iterator[Check]:
    gpus, problem = machine.gpus()
    yield from (Check("GPU", "ok", gpu) for gpu in gpus)
    if problem:
        yield Check("GPU", "fail", f"nvidia-smi: {problem}", "check the driver")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Check(
            "CUDA", "ok", f"torch built for {torch.version.cuda}, {torch.cuda.device_count()} GPUs, NCCL {nccl}"
        )
        if not torch.cuda.is_bf16_supported():
            yield Check("bf16", "warn", "this GPU has no bf16", "set engine.precision=fp16")
    elif gpus:
        advice = f"install a CUDA build of torch (this one is {torch.__version__})"
        yield Check("CUDA", "fail", "there is a GPU, but torch cannot use it", advice)
    else:
        yield Check("CUDA", "note", "no GPU; jobs run on the processors over gloo")


def _operators() -> Iterator[Check]:
    if importlib.util.find_spec("deepspeed") is None or importlib.util.find_spec("torch") is None:
        return
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=False)
    from deepspeed.accelerator import get_accelerator

    compiler = shutil.which("g++") or shutil.which("c++")
    for name in ("CPUAdam", "FusedAdam", "FusedLamb"):
        builder = get_accelerator().create_op_builder(f"{name}Builder")
        label = f"DeepSpeed {name}"
        if builder is None or type(builder).__name__ == "NotImplementedBuilder":
            yield Check(label, "note", "not made for this device; torch's version is used")
        elif compiler is None or shutil.which("ninja") is None:
            yield Check(label, "note", "not built: needs g++ and ninja on PATH; torch's version is used")
        elif builder.is_compatible(verbose=False):
            yield Check(label, "ok", "can be built on first use")
        else:
            yield Check(label, "note", "cannot be built here; torch's version is used")


def _network() -> Iterator[Check]:
    for tool, why in (("ssh", "--hostfile"), ("pdsh", "--launcher deepspeed"), ("sbatch", "--launcher slurm")):
        found = shutil.which(tool)
        yield Check(tool, "ok", found) if found else Check(tool, "note", f"absent; only {why} needs it")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        advice = "on several hosts over gloo put GLOO_SOCKET_IFNAME=<interface> into .deepspeed_env"
        yield Check("host name", "note", f"{socket.gethostname()} resolves to {address}", advice)
    else:
        yield Check("host name", "ok", f"{socket.gethostname()} resolves to {address}")
