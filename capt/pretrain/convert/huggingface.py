"""Checkpoint -> stock masked-language model, loaded back and compared with our model before it is in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.convert.reference import (
    TEXTS,
    Pooling,
    card_inputs,
    load_with_transformers,
    probe_batches,
    require_close,
)
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.families import own_encoder
from capt.pretrain.models.hf_map import HEAD_FILE, split, to_hf
from capt.tokenizer.check import check_with_transformers
from capt.tokenizer.encode import TextTokenizer, load_tokenizer


def write_hf(model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int) -> None:
    """Write a masked-language model of transformers into ``folder``; there is no ``pooling`` in it."""
    write_description(model.config, tokenizer, folder, max_length=max_length)
    write_tensors(folder / "model.safetensors", to_hf(model.state_dict(), model.config), {"format": "pt"})
    if model.aggregation is not None:
        # A head has no place in transformers' class, and goes into a file of its own.
        head = {name: tensor.contiguous() for name, tensor in model.aggregation.state_dict().items()}
        write_tensors(folder / HEAD_FILE, head, {"format": "pt", "pooling": model.config.pooling})


def write_description(
    config: EncoderConfig,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    max_length: int,
    architecture: str | None = None,
) -> None:
    """Write ``config.json`` and the tokenizer's two files.

    Raises:
        CheckpointError: the tokenizer has ids for which the model has no row, or pads with another id.
    """
    if tokenizer.vocab_size > config.classes or tokenizer.special.pad != config.pad_id:
        raise CheckpointError(
            f"the tokenizer ({tokenizer.vocab_size} ids, padding {tokenizer.special.pad}) is not the model's "
            f"({config.classes} rows, padding {config.pad_id})"
        )
    described = config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
    write_json(folder / "config.json", described | {"architectures": [architecture or config.hf.masked_lm]})
    tokenizer.save(folder, model_max_length=max_length, types=False)


def write_encoder(model: CaptModel, tokenizer: TextTokenizer, folder: Path, *, max_length: int) -> None:
    """Write the encoder alone, as a folder of a bare encoder such as ``RobertaModel``.

    Where that has a pooler, which we do not have, transformers would fill it at random, with a warning to every user;
    zeros keep it silent, and its output the same for every input.
    """
    hf = model.config.hf
    write_description(model.config, tokenizer, folder, max_length=max_length, architecture=hf.encoder)
    prefix = hf.prefix
    named = to_hf(model.state_dict(), model.config)
    # The language-model head stays behind, and names lose the prefix of the class that has one.
    tensors = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    if hf.pooler is not None:
        hidden = model.config.hidden
        tensors |= {f"{hf.pooler}.weight": torch.zeros(hidden, hidden), f"{hf.pooler}.bias": torch.zeros(hidden)}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def encoder_tensors(encoder: Encoder, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy the encoder's weights under the names of transformers' bare model of its family.

    Args:
        encoder: one that `capt.pretrain.models.foreign.encoder.build_encoder` makes of ``hf_config``.
        hf_config: the keys of its ``config.json``.
    """
    state, own = encoder.state_dict(), own_encoder(hf_config)
    if own is None:
        # A copy under the same names: the model runs on transformers' own class already.
        return split(state, {name: (name,) for name in state})
    config = own.from_hf(hf_config)
    named = config.to_hf_tensors({f"encoder.{name}": tensor for name, tensor in state.items()})
    table = config.hf_names()
    tensors = split(named, {ours: theirs for ours, theirs in table.items() if ours in named})
    return {name.removeprefix(own.hf.prefix): tensor for name, tensor in tensors.items()}


@torch.no_grad()
def check_hf(model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int) -> float:
    """Load ``folder`` with transformers; return the largest relative difference of its logits from ours.

    Raises:
        CheckpointError: transformers misses or ignores a tensor, does not tie the head, or a logit differs.
        DataError: a text gets other ids.
    """
    import transformers

    loaded = load_with_transformers(getattr(transformers, model.config.hf.masked_lm), folder)
    require_tied(loaded.get_output_embeddings(), loaded.get_input_embeddings())
    worst = 0.0
    # Logits at padding mean nothing, and are left out on both sides.
    for tokens in probe_batches(model.config, tokenizer):
        real = tokens != model.config.pad_id
        ours = model.mlm.logits(model.encode(tokens, padded=True)[real])
        theirs = loaded(input_ids=tokens, attention_mask=real.long()).logits[real]
        worst = max(worst, require_close("Hugging Face export, logits", ours, theirs))
    # The probes choose their ids themselves. A user calls the exported tokenizer, as the model card shows.
    for given in card_inputs(folder):
        tokens, real = given["input_ids"], given["attention_mask"].bool()
        ours = model.mlm.logits(model.encode(tokens, padded=True)[real])
        theirs = loaded(**given).logits[real]
        worst = max(worst, require_close("Hugging Face export, what its tokenizer gives", ours, theirs))
    check_tokenizer(folder, tokenizer)
    return worst


def require_tied(output: nn.Module, table: nn.Module) -> None:
    """Raise ``CheckpointError`` unless the output matrix is the word embedding.

    Equal values are not enough: newer releases load an untied head with a warning alone.
    """
    if output.weight.data_ptr() != table.weight.data_ptr():  # type: ignore[operator]
        raise CheckpointError("transformers does not tie the output matrix to the word embedding; nothing written")


def check_tokenizer(folder: Path, tokenizer: TextTokenizer) -> None:
    """Raise ``CheckpointError`` or ``DataError`` unless transformers reads texts in ``folder`` as ``tokenizer``."""
    check_with_transformers(folder, TEXTS)
    if load_tokenizer(folder).fingerprint != tokenizer.fingerprint:
        raise CheckpointError("the written tokenizer is not the checkpoint's; nothing written")
