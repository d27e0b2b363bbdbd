"""A sentence-transformers folder in the legacy form, which old and new releases and serving tools load alike.

Releases from 5.4 on write ``pooling_mode`` and ``sentence_transformers.base...`` types; before, and in serving tools,
a pooling file has one boolean a mode and types are ``sentence_transformers.models...``. New releases read the old form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.convert.huggingface import write_encoder
from capt.pretrain.convert.reference import (
    LONG_TEXT,
    ONE_VECTOR,
    TEXTS,
    Pooling,
    embed,
    one_vector,
    require_close,
    tokenize,
)
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.capt import CaptModel
from capt.tokenizer.encode import TextTokenizer

_POOLING_MODES = (
    "pooling_mode_cls_token",
    "pooling_mode_mean_tokens",
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
    "pooling_mode_lasttoken",
)
_MODE_OF = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}

_GELU, IDENTITY = "torch.nn.modules.activation.GELU", "torch.nn.modules.linear.Identity"
"""The functions that follow the linear maps of the aggregation head; names under ``torch.`` need no trust."""


def write_sentence_transformers(
    model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int
) -> None:
    """Write the encoder and its modules into ``folder``.

    ``head`` is Pooling + Dense(GELU) + Dense(Identity) + Normalize; ``cls`` and ``mean`` are Pooling + Normalize.
    """
    write_encoder(model, tokenizer, folder, max_length=max_length)
    mode, dense = model.config.pooling if pooling == "head" else pooling, []
    if pooling == "head":
        assert model.aggregation is not None, "require_pooling has seen the head"
        dense = [(model.aggregation.inner, _GELU), (model.aggregation.outer, IDENTITY)]
    write_modules(folder, hidden=model.config.hidden, mode=mode, dense=dense, max_length=max_length)


def write_modules(
    folder: Path,
    *,
    hidden: int,
    mode: str,
    dense: Sequence[tuple[torch.nn.Linear, str]] = (),
    max_length: int,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write what makes an encoder's folder one of sentence-transformers, up to unit rows.

    Args:
        folder: has the encoder and its tokenizer.
        hidden: columns of the hidden states.
        mode: mean, cls or last.
        dense: linear maps after the pooling, each with the path of the function that follows it.
        max_length: ids to cut inputs to, special tokens and prompt included.
        prompts: text before an input, by the name under which ``encode`` asks for it.
    """
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            # The encoder lies in the folder itself, as the legacy form has it.
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    pooling_config = {name: name == _MODE_OF[mode] for name in _POOLING_MODES}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **pooling_config})
    # 0 is the encoder and 1 the pooling.
    for number, (linear, activation) in enumerate(dense, 2):
        _write_dense(linear, folder / f"{number}_Dense", activation)
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    # Without a sentence-transformers version, on purpose: releases older than the named one would warn.
    versions = {"transformers": version("transformers"), "pytorch": torch.__version__}
    settings: dict[str, Any] = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    write_json(
        folder / "config_sentence_transformers.json",
        {"model_type": "SentenceTransformer", "__version__": versions, **settings},
    )


def _write_dense(linear: torch.nn.Linear, folder: Path, activation: str) -> None:
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
    config = {**sizes, "bias": linear.bias is not None, "activation_function": activation}
    write_json(folder / "config.json", config)
    tensors = {f"linear.{name}": parameter.detach().contiguous() for name, parameter in linear.named_parameters()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def check_sentence_transformers(
    model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int
) -> float:
    """Compare the embeddings of ``folder`` with ours, as `check_vectors`."""
    return check_vectors(folder, lambda tokens: embed(model, tokens, pooling), tokenizer, max_length)


@torch.no_grad()
def check_vectors(
    folder: Path,
    vectors: Callable[[Int[Tensor, "n L"]], Float[Tensor, "n d"]],
    tokenizer: TextTokenizer,
    max_length: int,
    prompts: Iterable[tuple[str | None, str]] = ((None, ""),),
) -> float:
    """Load ``folder`` without network and without trusting code in it; return the largest relative difference.

    Args:
        folder: an export.
        vectors: gives our own vectors of token ids.
        tokenizer: our own.
        max_length: ids to cut inputs to.
        prompts: the names by which ``encode`` is asked for texts before an input, and these.

    Raises:
        CheckpointError: an embedding differs, or depends on the texts beside its own.
    """
    from sentence_transformers import SentenceTransformer

    loaded: Any = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False, local_files_only=True)
    worst = 0.0
    for name, prompt in prompts:
        # Several short texts with padding, and one that is cut.
        for texts in (list(TEXTS), [LONG_TEXT]):
            theirs = loaded.encode(texts, prompt_name=name, convert_to_numpy=True, show_progress_bar=False)
            ours = vectors(tokenize([prompt + text for text in texts], tokenizer, max_length))
            what = f"sentence-transformers export, {name}" if name else "sentence-transformers export"
            worst = max(worst, require_close(what, ours, theirs))

    def encode(texts: list[str]) -> Any:
        return loaded.encode(texts, batch_size=len(texts), prompt="", convert_to_numpy=True, show_progress_bar=False)

    if (change := max(one_vector(encode))) > ONE_VECTOR:
        raise CheckpointError(
            f"sentence-transformers export: the vector of a text changes by {change:.1e} of its length with the texts "
            f"beside it (allowed {ONE_VECTOR:g}); nothing written"
        )
    return worst
