"""LXMERT -> stock ``LxmertForPreTraining`` or ``LxmertForQuestionAnswering`` folder, compared with our own model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pretrain.base.errors import CheckpointError
from pretrain.base.files import write_json
from pretrain.base.quiet import quiet_transformers
from pretrain.convert.lxmert_check import check_lxmert_hf
from pretrain.convert.output import export_folder
from pretrain.engine.durable import write_tensors
from pretrain.models.hf_map import HEAD_FILE
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.hf_config import Architecture, hf_keys
from pretrain.models.lxmert.names import AGGREGATION, FOR_QUESTION_ANSWERING, HEADS, to_hf
from tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


def export_lxmert_hf(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    out: Path,
    card: str,
    *,
    architecture: Architecture,
    answers: Sequence[str] | None = None,
    max_length: int | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> None:
    """Write ``out``, load it with transformers, and compare every logit and the token ids with ours.

    The folder holds ``config.json``, ``model.safetensors``, the tokenizer's two files, ``README.md`` and, from a model
    with one, ``capt_head.safetensors`` (the aggregation head). It needs nothing of ours to load.

    Args:
        state: weights under the names of `LxmertModel`; for question answering ``encoder.``, ``pooler.`` and
            ``answer_head.`` suffice.
        config: the model's configuration, filled in.
        tokenizer: its tokenizer.
        out: the folder to make.
        card: text of ``README.md``.
        architecture: the stock class.
        answers: labels of the answer head's logits.
        max_length: the tokenizer's limit in ids; without it the number of positions.
        check: False leaves the comparison out.
        overwrite: replace an older export.

    Raises:
        CheckpointError: the weights are not this model's, the class cannot hold it, ``out`` is taken, or the check
            fails.
        DataError: transformers reads the tokenizer differently. Nothing is left behind in either case.
    """
    with export_folder(out, overwrite=overwrite) as folder:
        write_lxmert_hf(
            state, config, tokenizer, folder, architecture=architecture, answers=answers, max_length=max_length
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        if check:
            with quiet_transformers():
                difference = check_lxmert_hf(state, config, tokenizer, folder, architecture)
            logger.info("%s: transformers gives our logits within %.1e", out, difference)


def write_lxmert_hf(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    architecture: Architecture,
    answers: Sequence[str] | None = None,
    max_length: int | None = None,
) -> None:
    """Write configuration, weights and tokenizer into ``folder``, which exists. Arguments as in `export_lxmert_hf`."""
    if tokenizer.vocab_size > config.known("vocab_size") or tokenizer.special.pad != config.pad_id:
        raise CheckpointError(
            f"the tokenizer ({tokenizer.vocab_size} ids, padding {tokenizer.special.pad}) is not the model's "
            f"({config.vocab_size} rows, padding {config.pad_id})"
        )
    special = tokenizer.special
    keys = hf_keys(config, architecture=architecture, bos_id=special.bos, eos_id=special.eos, answers=answers)
    tensors = to_hf(state, config, _groups(config, architecture))
    write_json(folder / "config.json", keys)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    head = {
        name.removeprefix(AGGREGATION): x.detach().clone().contiguous()
        for name, x in state.items()
        if name.startswith(AGGREGATION)
    }
    if head:
        write_tensors(folder / HEAD_FILE, head, {"format": "pt", "pooling": config.pooling})
    tokenizer.save(folder, model_max_length=max_length or config.max_positions)


def _groups(config: LxmertConfig, architecture: Architecture) -> list[str]:
    """The heads that the class has."""
    if architecture == "LxmertForQuestionAnswering":
        if not config.known("answers"):
            raise CheckpointError(f"the model has no answer head, which {architecture} is made of")
        return list(FOR_QUESTION_ANSWERING)
    absent = {
        "region_heads.objects": not config.known("object_classes"),
        "region_heads.attributes": not config.known("attribute_classes"),
        "answer_head": not config.known("answers"),
    }
    return [group for group in HEADS if not absent.get(group, False)]
