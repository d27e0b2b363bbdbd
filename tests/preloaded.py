"""What the fork server of `tests.support` has imported before it forks a process for a test; nobody else imports it."""
# ruff: noqa: F401

import gc

import deepspeed.module_inject.auto_ep_layer
import numpy.ctypeslib
import pyarrow.parquet
import pytest
import sentencepiece.sentencepiece_model_pb2
import torch._dynamo
import transformers.models.auto.modeling_auto
import transformers.models.roberta.modeling_roberta
import typer.testing

import finetune.glue.task
import launcher.cli
import pretrain.engine.engines.deepspeed
import pretrain.engine.run
import pretrain.language.task
import pretrain.latent.task
import pretrain.vision_language.task
import tests.support
import tests.toy.task
import tokenizer.train

gc.collect()
gc.freeze()  # the garbage collector of a forked process then passes over all of this, and copies none of its pages
gc.unfreeze = lambda: None  # a job that ends would hand it back: the next one of that process would look through all
