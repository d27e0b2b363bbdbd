"""Imports of the fork server of `tests.support`, before it forks for a test; nobody else imports this file."""
# ruff: noqa: F401

import functools
import gc
import importlib
import inspect
import types

import deepspeed.module_inject.auto_ep_layer
import deepspeed.utils.nvtx
import numpy.ctypeslib
import pyarrow.parquet
import pytest
import sentencepiece.sentencepiece_model_pb2
import torch._dynamo
import transformers.models.auto.modeling_auto
import transformers.models.roberta.modeling_roberta
import typer.testing

import capt.launcher.cli
import capt.pretrain.engine.engines.deepspeed
import capt.pretrain.engine.run
import capt.pretrain.retrieval.work
import capt.tokenizer.train
import tests.pairs
import tests.runs
import tests.small_job
import tests.support
import tests.toy.task
import tests.toy_chunks.task
import tests.toy_finetune.task
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.registry import RELIABILITY, TASKS

for path in RELIABILITY.values():
    importlib.import_module(path.partition(":")[0])
for package in TASKS.values():
    importlib.import_module(f"{package}.task")
provenance()  # git, and the metadata of eight packages: the same for each run that is forked from here

# A sixth of the function calls of a small step: marks for a profiler of GPUs around each function of DeepSpeed, and the
# signature of each autograd function anew in each call.
deepspeed.utils.nvtx.enable_nvtx = False
torch.autograd.function.inspect = types.SimpleNamespace(  # type: ignore[attr-defined]
    **{**vars(inspect), "signature": functools.cache(inspect.signature)}
)

gc.collect()
gc.freeze()  # the garbage collector of a forked process then passes over all of this, and copies none of its pages
gc.unfreeze = lambda: None  # a job that ends would hand it back: the next one of that process would look through all
