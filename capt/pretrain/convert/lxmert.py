"""LXMERT -> stock ``LxmertForPreTraining`` or ``LxmertForQuestionAnswering`` folder, compared with our own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.convert.huggingface import check_tokenizer, require_tied
from capt.pretrain.convert.output import write_export
from capt.pretrain.convert.reference import TEXTS, card_inputs, load_with_transformers, require_close, tokenize
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.hf_map import HEAD_FILE
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.hf_config import Architecture, hf_keys
from capt.pretrain.models.lxmert.layers import LxmertEncoder
from capt.pretrain.models.lxmert.model import AnswerHead, Pooler, build_model
from capt.pretrain.models.lxmert.read import AGGREGATION, FOR_QUESTION_ANSWERING, HEADS, to_hf
from capt.tokenizer.encode import TextTokenizer

_REGIONS = 7


@torch.no_grad()
def check_lxmert(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    folder: Path,
    architecture: Architecture,
) -> float:
    """Load ``folder`` with transformers; return the largest relative difference of its logits from ours.

    Raises:
        CheckpointError: transformers misses or ignores a tensor, does not tie the head, or a logit differs.
        DataError: a text gets other ids.
    """
    import transformers

    loaded = load_with_transformers(getattr(transformers, architecture), folder)
    answering = architecture == "LxmertForQuestionAnswering"
    # The class for question answering has no language-model head.
    if not answering:
        require_tied(loaded.cls.predictions.decoder, loaded.lxmert.embeddings.word_embeddings)
    ours = _answerer(state, config) if answering else build_model(state, config, str(folder)).float()
    worst = 0.0
    for batch in _probes(config, tokenizer):
        mine = _answering(ours, *batch) if answering else _pretraining(ours, *batch)
        for name, theirs in _stock(loaded, config, *batch).items():
            worst = max(worst, require_close(f"Hugging Face export, {name}", mine[name], theirs))
    # The probes choose their ids themselves. A user calls the exported tokenizer, as the model card shows.
    generator = torch.Generator().manual_seed(1)
    for given in card_inputs(folder, pairs=False):
        regions = len(given["input_ids"]), _REGIONS
        features = torch.randn(*regions, config.known("feature_size"), generator=generator)
        boxes = torch.rand(*regions, 4, generator=generator)
        batch = (given["input_ids"], features, boxes, torch.ones(regions, dtype=torch.bool))
        mine = _answering(ours, *batch) if answering else _pretraining(ours, *batch)
        for name, theirs in _stock(loaded, config, *batch, **given).items():
            worst = max(
                worst, require_close(f"Hugging Face export, what its tokenizer gives, {name}", mine[name], theirs)
            )
    check_tokenizer(folder, tokenizer)
    return worst


Probe = tuple[Int[Tensor, "n L"], Float[Tensor, "n R f"], Float[Tensor, "n R 4"], Bool[Tensor, "n R"]]


def _probes(config: LxmertConfig, tokenizer: TextTokenizer) -> Iterator[Probe]:
    """Yield sentences of several lengths, and a random one as long as the position table, with random regions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.known("vocab_size"), (1, config.max_positions), generator=generator)
    # Padding inside a random sentence would be masked; the unknown token takes its place.
    for tokens in (
        tokenize(TEXTS, tokenizer, config.max_positions),
        ids.masked_fill(ids == config.known("pad_id"), tokenizer.special.unk),
    ):
        n = len(tokens)
        # Some regions are absent, but of no picture all.
        present = torch.rand(n, _REGIONS, generator=generator) < 0.8
        present[:, 0] = True
        features = torch.randn(n, _REGIONS, config.known("feature_size"), generator=generator)
        boxes = torch.rand(n, _REGIONS, 4, generator=generator)
        real = present.unsqueeze(-1)
        yield tokens, features * real, boxes * real, present


def _stock(loaded: Any, config: LxmertConfig, *batch: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """Return the logits of transformers' class, those of words and regions where there are any.

    ``given`` is what its tokenizer gives; without it the class is called with ids and mask.
    """
    tokens, features, boxes, present = batch
    real = tokens != config.known("pad_id")
    # The ids alone, or all that the tokenizer gives: both are ways in which users call it.
    inputs = given or {"input_ids": tokens, "attention_mask": real.float()}
    out = loaded(
        **inputs, visual_feats=features, visual_pos=boxes, visual_attention_mask=present.float(),
        output_hidden_states=True,
    )  # fmt: skip
    found = {"answers": out.question_answering_score} if config.answers else {}
    if hasattr(loaded, "obj_predict_head"):
        found |= {"words": out.prediction_logits[real], "matching": out.cross_relationship_score}
        # The class computes the loss and not the logits of regions, so its head is called by itself.
        of_regions = loaded.obj_predict_head(out.vision_hidden_states[-1])
        names = {"obj": "objects", "attr": "attributes", "feat": "features"}
        found |= {names[key]: value[present] for key, value in of_regions.items()}
    return found


def _pretraining(model: Any, *batch: Tensor) -> dict[str, Tensor]:
    tokens, features, boxes, present = batch
    hidden = model.encoder(tokens, features, boxes, padded=True, present=present)
    pooled = model.pooler(hidden.words[:, 0])
    of_regions = model.region_heads(hidden.regions)
    found = {name: x[present] for name, x in of_regions._asdict().items() if x is not None}
    real = tokens != model.config.known("pad_id")
    found |= {"words": model.mlm.logits(hidden.words[real]), "matching": model.matching(pooled)}
    return found | ({"answers": model.answer_head(pooled)} if model.answer_head is not None else {})


def _answerer(state: Mapping[str, Tensor], config: LxmertConfig) -> nn.ModuleDict:
    """Build the parts of our model that question answering needs, with their weights."""
    plain = config.model_copy(update={"activation_checkpointing": "none"})
    parts = nn.ModuleDict(
        {
            "encoder": LxmertEncoder(plain),
            "pooler": Pooler(config.hidden),
            "answer_head": AnswerHead(config.hidden, config.known("answers"), eps=config.layer_norm_eps),
        }
    )
    # Weights of other heads, and of the aggregation, are in no part that is needed.
    parts.load_state_dict({name: x for name, x in state.items() if name.split(".")[0] in parts})
    return parts.eval()


def _answering(parts: Any, *batch: Tensor) -> dict[str, Tensor]:
    tokens, features, boxes, present = batch
    first = parts["encoder"].first(tokens, features, boxes, padded=True, present=present)
    return {"answers": parts["answer_head"](parts["pooler"](first))}


def export_lxmert(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    out: Path,
    card: str,
    *,
    architecture: Architecture,
    answers: Sequence[str] | None = None,
    max_length: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``out``, load it with transformers, and compare every logit and the token ids with ours; returns ``out``.

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
        overwrite: replace an older export.

    Raises:
        CheckpointError: the weights are not this model's, the class cannot hold it, ``out`` is taken, or the check
            fails.
        DataError: transformers reads the tokenizer differently. Nothing is left behind in either case.
    """
    return write_export(
        out,
        write=lambda folder: _write(state, config, tokenizer, folder, architecture, answers, max_length),
        check=lambda folder: check_lxmert(state, config, tokenizer, folder, architecture),
        card=card,
        agrees="transformers gives our logits",
        overwrite=overwrite,
    )


def _write(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    folder: Path,
    architecture: Architecture,
    answers: Sequence[str] | None,
    max_length: int | None,
) -> None:
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
    """Return the heads that the class has."""
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
