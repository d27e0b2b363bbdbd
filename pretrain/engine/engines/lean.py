"""Keeps DeepSpeed from what it does at the start of every rank, seconds of a core, and training has no use for."""

from __future__ import annotations

from contextlib import suppress

import deepspeed
from deepspeed.runtime import compiler


def keep_deepspeed_lean() -> None:
    """Be called before the first engine is built. No number depends on it.

    What another release of DeepSpeed does not have is left alone.

    To find out which of its operators a machine could build, DeepSpeed runs a compiler, unless somebody has said so
    before. It asks for one of them alone, which it would build with g++ in the first run on CPUs (minutes) and load in
    every other one: it serves ``inference_all_reduce``, which training never calls.

    Every engine imports its Muon, which is not ours and which no job can choose. Importing it compiles its functions,
    and so loads the whole of torch's compiler.
    """
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    compiling = getattr(compiler, "compile", None)
    if compiling is None:
        return
    compiler.compile = lambda: lambda function: function
    try:
        with suppress(ImportError):
            from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    finally:
        compiler.compile = compiling
