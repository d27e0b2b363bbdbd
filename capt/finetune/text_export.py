"""Checkpoint -> stock ``...ForSequenceClassification`` folder, or ONNX, loaded back and compared before it is in place.

The class is the family's own, for our encoders and for those of transformers. Label names go into ``config.json``:
models whose classes have only numbers are read in the wrong order sooner or later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import transformers
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from capt.finetune.batches import TextRows
from capt.finetune.encoding import encode_texts
from capt.finetune.load import FineTuned
from capt.finetune.text_task import Kind, TextTask
from capt.finetune.text_training import Classifier
from capt.pretrain.base.files import write_json
from capt.pretrain.convert.card import About, CardFacts, plain_text, result, table
from capt.pretrain.convert.huggingface import encoder_tensors
from capt.pretrain.convert.onnx import open_graph, real_tokens, require_packages, write_graph
from capt.pretrain.convert.output import write_export
from capt.pretrain.convert.quantized import compare_logits, is_int8, quantize_graph
from capt.pretrain.convert.reference import SPREAD, TEXTS, card_inputs, load_with_transformers, require_close
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.architecture import Family
from capt.pretrain.models.foreign.families import family_of
from capt.tokenizer.check import check_with_transformers

logger = logging.getLogger(__name__)

_PROBLEM_TYPES: dict[Kind, str] = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multi_label": "multi_label_classification",
}

_OUTPUTS: dict[Kind, Literal["class", "labels", "order"]] = {
    "classification": "class",
    "regression": "order",
    "multi_label": "labels",
}

_CARD = """\
{head}

# {name}

An encoder fine-tuned on {title}, from {init}. {meaning}

## Use

```python
{use}
```
{file}
## Last measurements of the run

{metrics}
"""

_USE = {
    "hf": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

classify = pipeline("text-classification", model="{location}", tokenizer="{location}", top_k=None)
print(classify({text}, truncation=True))

tokenizer = AutoTokenizer.from_pretrained("{location}")
model = AutoModelForSequenceClassification.from_pretrained("{location}")
logits = model(**tokenizer({texts}, truncation=True, return_tensors="pt")).logits""",
    "onnx": """\
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{location}")
session = onnxruntime.InferenceSession("{location}/model.onnx")
inputs = tokenizer({texts}, padding=True, truncation=True, return_tensors="np")
logits = session.run(["logits"], {{name: values.astype("int64") for name, values in inputs.items()}})[0]""",
}
_FILE = """
Of a table of new rows: `capt predict {location} new.csv --out predictions.csv`.
"""


class Presentation(NamedTuple):
    """The words of a card, and the keys of ``config.json``, that go with a kind of outputs.

    Attributes:
        use: the code of the card, by the target.
        tag: the pipeline of the hub.
        library: what reads the folder of transformers.
        keys: further keys of ``config.json``.
    """

    use: Mapping[str, str]
    tag: str
    library: str
    keys: Mapping[str, Any]


LABELS = Presentation(_USE, "text-classification", "transformers", {})
"""Labels and scores of texts."""


AnyClassifier = FineTuned[Any, Classifier]
"""A checkpoint of a `TextJob`, loaded."""


def export_classifier(
    trained: AnyClassifier, out: Path, *, to: str = "hf", quantize: str | None = None, overwrite: bool = False,
    about: About | None = None, shown_as: Presentation = LABELS,
) -> Path:  # fmt: skip
    """Write ``out``, compute it with the library that reads it and compare its logits with ours; returns ``out``.

    The logit of a score is on the scale of the labels (0 to 5 for STS-B).

    Args:
        trained: a checkpoint.
        out: the folder to make.
        to: ``hf`` (a class of transformers) or ``onnx``.
        quantize: ``int8``: of ONNX, a second graph in int8; what it loses is logged.
        overwrite: replace an older export.
        about: for the model card.
        shown_as: the words of the card.

    Raises:
        CheckpointError: ``out`` is taken, or the library computes something else.
        ConfigError: packages of the ONNX export are missing.
        DataError: transformers reads the tokenizer differently. Nothing is left behind in either case.
    """
    int8 = is_int8(quantize, to)
    if to == "onnx":
        require_packages()
    said: list[str] = []
    hf_config = trained.job.model.encoder
    assert hf_config is not None, "TextJob.with_encoder fills it in"
    family = family_of(hf_config, str(trained.checkpoint))

    def write(folder: Path) -> None:
        labels = _labels(trained.job.data.text_task)
        config = {**hf_config, **family.keys, **labels, **shown_as.keys, "architectures": [family.architecture]}
        write_json(folder / "config.json", config)
        if to == "hf":
            write_tensors(folder / "model.safetensors", _tensors(trained, family), {"format": "pt"})
        else:
            task = trained.job.data.text_task
            graph = _Logits(trained.model, task.scale, task.offset)
            encoder = trained.model.encoder.model
            write_graph(graph, folder, graph.inputs, ("logits",), encoder.max_positions, encoder.pad_id)
        length = trained.job.data.sequence_length
        trained.tokenizer.save(folder, model_max_length=length, types=trained.model.reads_types)
        if int8:
            quantize_graph(folder)
            texts = [*SPREAD, *TEXTS]
            inputs = _inputs(trained, _rows(trained, texts, texts[::-1]), np.arange(len(texts)))
            kind = _OUTPUTS[trained.job.data.text_task.kind]
            said.append(compare_logits(folder, {name: each.numpy() for name, each in inputs.items()}, kind))

    written = write_export(
        out,
        write=write,
        check=lambda folder: _check(trained, family, folder, to),
        card=_card(trained, to, about, shown_as),
        agrees=f"{family.architecture if to == 'hf' else 'onnxruntime'} gives our logits",
        overwrite=overwrite,
    )
    for line in said:
        logger.info("%s", line)
    return written


class _Logits(nn.Module):
    """The graph of a classifier: logits, those of scores on the scale of the labels."""

    def __init__(self, model: Classifier, scale: float, offset: float) -> None:
        super().__init__()
        self.model, self._scale, self._offset = model.cpu(), scale, offset
        types = ("token_type_ids",) if model.reads_types else ()
        self.inputs = ("input_ids", "attention_mask", *types)

    def forward(
        self,
        input_ids: Int[Tensor, "n L"],
        attention_mask: Int[Tensor, "n L"],
        token_type_ids: Int[Tensor, "n L"] | None = None,
    ) -> Float[Tensor, "n outputs"]:
        encoder = self.model.encoder.model
        tokens, _ = real_tokens(input_ids, attention_mask, encoder.pad_id, encoder.vocab_size)
        return self._scale * self.model(tokens, token_type_ids, padded=True) + self._offset  # type: ignore[no-any-return]


def _labels(task: TextTask) -> dict[str, Any]:
    names = task.names or ("score",)
    return {
        "problem_type": _PROBLEM_TYPES[task.kind],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _tensors(trained: AnyClassifier, family: Family) -> dict[str, Tensor]:
    model, task = trained.model, trained.job.data.text_task
    # Scale and offset of scores go into the last layer: transformers knows neither.
    out = {"weight": model.out.weight * task.scale, "bias": model.out.bias * task.scale + task.offset}
    head = {f"{family.dense}.{name}": tensor for name, tensor in model.dense.named_parameters()}
    if model.norm is not None and family.norm is not None:
        head[f"{family.norm[0]}.weight"] = model.norm.weight
    head |= {f"{family.out}.{name}": tensor for name, tensor in out.items()}
    prefix = getattr(transformers, family.architecture).base_model_prefix
    encoder = encoder_tensors(model.encoder.model, trained.job.model.encoder)
    tensors = {f"{prefix}.{name}": tensor for name, tensor in encoder.items()}
    return tensors | {name: tensor.detach().clone().contiguous() for name, tensor in head.items()}


@torch.no_grad()
def _check(trained: AnyClassifier, family: Family, folder: Path, to: str) -> float:
    """Compute ``folder`` with the library that reads it; return the largest relative difference of its logits."""
    name, compute = (family.architecture, _with_transformers(family, folder)) if to == "hf" else ("ONNX", _onnx(folder))
    model, task = trained.model.cpu().eval(), trained.job.data.text_task
    rows = _rows(trained, TEXTS, TEXTS[::-1])
    # Several lengths with padding, then one alone: a mask that is read wrongly shows in the first.
    worst = 0.0
    for chosen in (rows.lengths.argsort(), rows.lengths.argsort()[:1]):
        theirs = compute(_inputs(trained, rows, chosen))
        ours = task.scale * model(*rows.batch(chosen).inputs) + task.offset
        worst = max(worst, require_close(f"{name}, logits", ours, theirs))
    for given in card_inputs(folder, pairs=task.pair, singles=not task.pair):
        ours = task.scale * model(given["input_ids"], given.get("token_type_ids"), padded=True) + task.offset
        worst = max(worst, require_close(f"{name}, what its tokenizer gives", ours, compute(given)))
    check_with_transformers(folder, TEXTS)
    return worst


def _rows(trained: AnyClassifier, first: Sequence[str], second: Sequence[str]) -> TextRows:
    """Texts, or pairs where the task is of pairs, as the model reads them."""
    section, types = trained.job.data, trained.model.reads_types
    assert section.sequence_length is not None
    others = second if section.text_task.pair else None
    encoded = encode_texts(first, others, trained.tokenizer, section.sequence_length, source="probe", types=types)
    return TextRows(encoded, None, trained.tokenizer.special.pad, types=types)


def _inputs(trained: AnyClassifier, rows: TextRows, chosen: Int64[np.ndarray, " n"]) -> dict[str, Tensor]:
    """Some rows by the names of transformers."""
    inputs = rows.batch(chosen).inputs
    segments = {} if inputs.types is None else {"token_type_ids": inputs.types}
    mask = (inputs.tokens != trained.tokenizer.special.pad).long()
    return {"input_ids": inputs.tokens, "attention_mask": mask, **segments}


def _with_transformers(family: Family, folder: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    loaded = load_with_transformers(getattr(transformers, family.architecture), folder)
    return lambda given: loaded(**given).logits


def _onnx(folder: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    session = open_graph(folder)
    return lambda given: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in given.items()})[0])


def _card(trained: AnyClassifier, to: str, about: About | None, shown_as: Presentation) -> str:
    task, init = trained.job.data.text_task, trained.job.model.init
    facts = CardFacts.read(trained.checkpoint, trained.job, init, about).validated()
    names = ", ".join(plain_text(name) for name in task.names)
    if task.kind == "regression":
        extent = "" if task.score_range is None else " from {:g} to {:g}".format(*task.score_range)
        meaning = f"The logit is a score{extent}."
    elif task.kind == "multi_label":
        meaning = f"Labels, each of which a text has where its logit is above 0: {names}."
    else:
        meaning = f"Classes: {names}."
    library = shown_as.library if to == "hf" else "onnx"
    fields = {"library_name": library, "pipeline_tag": shown_as.tag, "tags": list(task.tags)}
    scores = {name.removeprefix("validation/"): value for name, value in facts.metrics.items()}
    # The head of the card takes metrics of the benchmark, no diagnostics of ours.
    scores = {
        name: value
        for name, value in scores.items()
        if name not in ("loss", "degenerate", "baseline") and "/" not in name
    }
    results = [result(shown_as.tag, f"{task.title}, dev", scores, kind=task.tags[0])] if scores else []
    location, pair = facts.about.location, ('"the first text"', '"the second text"')
    one = f'{{"text": {pair[0]}, "text_pair": {pair[1]}}}' if task.pair else '"a text"'
    use = shown_as.use[to].format(location=location, texts=", ".join(pair) if task.pair else '"a text"', text=one)
    return _CARD.format(
        head=facts.about.head(fields, facts.name, results),
        use=use,
        file=_FILE.format(location=location) if to == "hf" else "",
        name=plain_text(facts.name),
        title=plain_text(task.title),
        init=plain_text(init.name),
        meaning=meaning,
        metrics=table({"steps": facts.progress["step"], **facts.metrics}),
    )
