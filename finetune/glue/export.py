"""Checkpoint -> stock ``...ForSequenceClassification`` folder, loaded back and compared before it is in place.

The class is RoBERTa's for our encoder, and the family's own for an encoder of transformers. Label names go into
``config.json``: models whose classes have only numbers are read in the wrong order sooner or later.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from capt.finetune.batches import TextRows
from capt.finetune.encoding import encode_texts
from capt.finetune.glue.restore import GlueClassifier, load_classifier
from capt.finetune.glue.tasks import GlueTask
from capt.finetune.restore import FineTuned
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.convert.card import About, final_metrics, plain_text, result, table
from capt.pretrain.convert.output import export_folder
from capt.pretrain.convert.reference import TEXTS, card_inputs, require_close
from capt.pretrain.data.sts_files import MAX_SCORE
from capt.pretrain.engine.checkpoint import read_metadata
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import TransformersEncoder
from capt.pretrain.models.foreign.families import Family, family_of
from capt.pretrain.models.hf_map import parameter_names
from capt.pretrain.models.roberta import RobertaEncoder
from capt.tokenizer.check import check_with_transformers

logger = logging.getLogger(__name__)

TARGETS = ("hf",)

_CARD = """\
{head}

# {name}

An encoder fine-tuned on GLUE's {folder}, from {init}. {meaning}

## Use

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{location}")
model = AutoModelForSequenceClassification.from_pretrained("{location}")
logits = model(**tokenizer({texts}, truncation=True, return_tensors="pt")).logits
```

## Last measurements of the run

{metrics}
"""


def command(checkpoint: Path, out: Path, *, to: str, overwrite: bool = False, about: About | None = None) -> Path:
    """`export` as ``capt convert`` calls it; ``to`` is one of ``TARGETS``."""
    return export(checkpoint, out, overwrite=overwrite, about=about)


def export(source: Path | GlueClassifier, out: Path, *, overwrite: bool = False, about: About | None = None) -> Path:
    """Write ``out``, load it with transformers and compare its logits with ours; returns ``out``.

    The logit of a score (STS-B) is on the scale of 0 to 5.

    Args:
        source: a checkpoint of a ``glue`` job, or a run (its best one).
        out: the folder to make.
        overwrite: replace an older export.
        about: for the model card.

    Raises:
        CheckpointError: as `load_classifier`, ``out`` is taken, or transformers computes something else.
        DataError: transformers reads the tokenizer differently. Nothing is left behind in either case.
    """
    restored = source if isinstance(source, FineTuned) else load_classifier(source)
    hf_config = restored.job.model.encoder
    assert hf_config is not None, "GlueJob.with_encoder fills it in"
    family = family_of(hf_config, str(restored.checkpoint))
    length = restored.job.data.sequence_length
    with export_folder(out, overwrite=overwrite) as folder:
        config = {**hf_config, **_labels(restored.job.data.glue_task), "architectures": [family.architecture]}
        write_json(folder / "config.json", config)
        write_tensors(folder / "model.safetensors", _tensors(restored, family), {"format": "pt"})
        restored.tokenizer.save(folder, model_max_length=length, types=restored.model.reads_types)
        (folder / "README.md").write_text(_card(restored, about or About()), encoding="utf-8")
        with quiet_transformers():
            difference = _check(restored, family, folder)
    logger.info("%s: %s gives our logits within %.1e", out, family.architecture, difference)
    return out


def _labels(task: GlueTask) -> dict[str, Any]:
    if task.regression:
        return {"problem_type": "regression", "id2label": {"0": "score"}, "label2id": {"score": 0}}
    numbered = dict(enumerate(task.names))
    return {
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in numbered.items()},
        "label2id": {name: number for number, name in numbered.items()},
    }


def _tensors(restored: GlueClassifier, family: Family) -> dict[str, Tensor]:
    model = restored.model
    scale = MAX_SCORE if restored.job.data.glue_task.regression else 1.0
    tensors = _encoder_tensors(model.encoder.model)
    for name, layer, factor in ((family.dense, model.dense, 1.0), (family.out, model.out, scale)):
        tensors |= {f"{name}.weight": layer.weight * factor, f"{name}.bias": layer.bias * factor}
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _encoder_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """The encoder's weights under the names that they have in transformers' classifier."""
    state = encoder.state_dict()
    if isinstance(encoder, TransformersEncoder):
        return {f"{encoder.model.base_model_prefix}.{name}": tensor for name, tensor in state.items()}
    assert isinstance(encoder, RobertaEncoder)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in parameter_names(encoder.config.layers):
        if ours.startswith("encoder."):
            parts = state[ours.removeprefix("encoder.")].chunk(len(theirs))
            tensors |= dict(zip(theirs, parts, strict=True))
    return tensors


@torch.no_grad()
def _check(restored: GlueClassifier, family: Family, folder: Path) -> float:
    """Load ``folder`` with transformers; the largest relative difference of its logits from ours."""
    cls = getattr(transformers, family.architecture)
    loaded, report = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            listed = ", ".join(map(str, sorted(report[problem])))
            raise CheckpointError(f"transformers reports {problem.replace('_', ' ')}: {listed}; nothing written")
    loaded.eval()
    scale = MAX_SCORE if restored.job.data.glue_task.regression else 1.0
    model, section = restored.model.cpu().eval(), restored.job.data
    second = TEXTS[::-1] if restored.job.data.glue_task.pair else None
    assert section.sequence_length is not None
    encoded = encode_texts(TEXTS, second, restored.tokenizer, section.sequence_length, source="probe")
    rows = TextRows(encoded, None, restored.tokenizer.special.pad, types=model.reads_types)
    worst = 0.0
    for chosen in (encoded.seconds.argsort(), encoded.seconds.argsort()[:1]):
        inputs = rows.batch(chosen).inputs
        segments = {} if inputs.types is None else {"token_type_ids": inputs.types}
        mask = (inputs.tokens != restored.tokenizer.special.pad).long()
        theirs = loaded(input_ids=inputs.tokens, attention_mask=mask, **segments).logits
        ours = scale * model(*inputs)
        worst = max(worst, require_close(f"{family.architecture}, logits", ours, theirs))
    pair = restored.job.data.glue_task.pair
    for given in card_inputs(folder, pairs=pair, singles=not pair):
        ours = scale * model(given["input_ids"], given.get("token_type_ids"), padded=True)
        theirs = loaded(**given).logits
        worst = max(worst, require_close(f"{family.architecture}, what its tokenizer gives", ours, theirs))
    check_with_transformers(folder, TEXTS)
    return worst


def _card(restored: GlueClassifier, about: About) -> str:
    task, run = restored.job.data.glue_task, restored.checkpoint.resolve().parent.parent
    step = read_metadata(restored.checkpoint).progress.step
    metrics = {name: value for name, value in final_metrics(run, step).items() if name.startswith("validation/")}
    meaning = "The logit is a similarity from 0 to 5." if task.regression else f"Classes: {', '.join(task.names)}."
    about = about.started_from(restored.job.model.init, run)
    fields = {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["glue", task.name]}
    scores = {name.removeprefix("validation/"): value for name, value in metrics.items()}
    scores = {name: value for name, value in scores.items() if name not in ("loss", "degenerate", "baseline")}
    results = [result("text-classification", f"GLUE {task.folder}, dev", scores, kind="glue")] if scores else []
    return _CARD.format(
        head=about.head(fields, run.name, results),
        location=about.location,
        name=plain_text(run.name),
        folder=task.folder,
        init=plain_text(restored.job.model.init.name),
        meaning=meaning,
        texts='"the first text", "the second text"' if task.pair else '"a text"',
        metrics=table({"steps": step, **metrics}),
    )
