"""Whether transformers computes what our LXMERT does, from a folder that was written for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.base.errors import CheckpointError
from pretrain.convert.reference import TEXTS, card_inputs, require_close, tokenize
from pretrain.models.lxmert.build import build_model
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.encoder import LxmertEncoder
from pretrain.models.lxmert.heads import AnswerHead, Pooler
from pretrain.models.lxmert.hf_config import Architecture
from tokenizer.check import check_with_transformers
from tokenizer.encode import TextTokenizer, load_tokenizer

_REGIONS = 7


@torch.no_grad()
def check_lxmert_hf(
    state: Mapping[str, Tensor],
    config: LxmertConfig,
    tokenizer: TextTokenizer,
    folder: Path,
    architecture: Architecture,
) -> float:
    """Load ``folder`` with transformers; the largest relative difference of its logits from ours.

    Raises:
        CheckpointError: transformers misses or ignores a tensor, does not tie the head, or a logit differs.
        DataError: a text gets other ids.
    """
    import transformers

    loaded: Any
    stock = getattr(transformers, architecture)
    loaded, report = stock.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(map(str, sorted(report[problem])))
            raise CheckpointError(f"transformers reports {problem.replace('_', ' ')}: {names}; nothing written")
    loaded.eval()
    answering = architecture == "LxmertForQuestionAnswering"
    if not answering:
        decoder, word = loaded.cls.predictions.decoder.weight, loaded.lxmert.embeddings.word_embeddings.weight
        if decoder.data_ptr() != word.data_ptr():
            raise CheckpointError("transformers does not tie the output matrix to the word embedding; nothing written")
    ours = _answerer(state, config) if answering else build_model(state, config, str(folder)).float()
    worst = 0.0
    for batch in _probes(config, tokenizer):
        mine = _answering(ours, *batch) if answering else _pretraining(ours, *batch)
        for name, theirs in _stock(loaded, config, *batch).items():
            worst = max(worst, require_close(f"Hugging Face export, {name}", mine[name], theirs))
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
    check_with_transformers(folder, TEXTS)
    if load_tokenizer(folder).fingerprint != tokenizer.fingerprint:
        raise CheckpointError("the written tokenizer is not the checkpoint's; nothing written")
    return worst


Probe = tuple[Int[Tensor, "n L"], Float[Tensor, "n R f"], Float[Tensor, "n R 4"], Bool[Tensor, "n R"]]


def _probes(config: LxmertConfig, tokenizer: TextTokenizer) -> Iterator[Probe]:
    """Sentences of several lengths with padding, and a random one as long as the position table; random regions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.known("vocab_size"), (1, config.max_positions), generator=generator)
    for tokens in (
        tokenize(TEXTS, tokenizer, config.max_positions),
        ids.masked_fill(ids == config.known("pad_id"), tokenizer.special.unk),
    ):
        n = len(tokens)
        present = torch.rand(n, _REGIONS, generator=generator) < 0.8
        present[:, 0] = True
        features = torch.randn(n, _REGIONS, config.known("feature_size"), generator=generator)
        boxes = torch.rand(n, _REGIONS, 4, generator=generator)
        real = present.unsqueeze(-1)
        yield tokens, features * real, boxes * real, present


def _stock(loaded: Any, config: LxmertConfig, *batch: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """The logits of transformers' class, those of words and regions where there are any.

    ``given`` is what its tokenizer gives; without it the class is called with ids and mask.
    """
    tokens, features, boxes, present = batch
    real = tokens != config.known("pad_id")
    inputs = given or {"input_ids": tokens, "attention_mask": real.float()}
    out = loaded(
        **inputs, visual_feats=features, visual_pos=boxes, visual_attention_mask=present.float(),
        output_hidden_states=True,
    )  # fmt: skip
    found = {"answers": out.question_answering_score} if config.answers else {}
    if hasattr(loaded, "obj_predict_head"):
        found |= {"words": out.prediction_logits[real], "matching": out.cross_relationship_score}
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
    """The parts of our model that question answering needs, with their weights."""
    plain = config.model_copy(update={"activation_checkpointing": "none"})
    parts = nn.ModuleDict(
        {
            "encoder": LxmertEncoder(plain),
            "pooler": Pooler(config.hidden),
            "answer_head": AnswerHead(config.hidden, config.known("answers"), eps=config.layer_norm_eps),
        }
    )
    parts.load_state_dict({name: x for name, x in state.items() if name.split(".")[0] in parts})
    return parts.eval()


def _answering(parts: Any, *batch: Tensor) -> dict[str, Tensor]:
    tokens, features, boxes, present = batch
    first = parts["encoder"].first(tokens, features, boxes, padded=True, present=present)
    return {"answers": parts["answer_head"](parts["pooler"](first))}
