"""Tasks of the ``mteb`` package with any encoder: the package brings data and figures, the encoder vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import ConfigError, DataError, did_you_mean
from capt.pretrain.engine.evaluations import Section, sections_as_text, write_result
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.engine.task import Role
from capt.pretrain.retrieval.encode import TOKENS, batches
from capt.pretrain.retrieval.encoders import TextEncoder, load_text_encoder
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.search import unit_rows

_ROLES: Mapping[str, Role] = {"query": "query", "document": "document"}
"""The prompt types of mteb; a text without one has no prompt."""


class MtebEncoder:
    """An encoder as `mteb.models.EncoderProtocol` asks for it."""

    def __init__(self, encoder: TextEncoder) -> None:
        from mteb.models.model_meta import ModelMeta

        self._encoder = encoder
        self.mteb_model_meta = ModelMeta.create_empty()

    def encode(self, inputs: Iterable[Mapping[str, Any]], **about: Any) -> Float[np.ndarray, "n d"]:
        """The vectors of the texts of some batches, in their order; ``prompt_type`` decides prompt and length."""
        kind = about.get("prompt_type")
        role = _ROLES.get(str(getattr(kind, "value", kind)), "text")
        texts = [text for batch in inputs for text in batch["text"]]
        lengths = self._encoder.lengths(texts, role)
        # In the order of the inputs, while batches are made by length.
        rows = np.empty((len(texts), self._encoder.dimension), dtype=np.float32)
        order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
        for batch in batches(order, lengths, TOKENS[device().type]):
            rows[batch] = self._encoder.encode([texts[i] for i in batch], role)
        return rows

    def similarity(self, first: Any, second: Any) -> Any:
        """The scores of all rows of ``first`` with all of ``second``."""
        left, right = self._comparable(first), self._comparable(second)
        return left @ right.T

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        """The score of each row of ``first`` with the same row of ``second``."""
        return (self._comparable(first) * self._comparable(second)).sum(-1)

    def _comparable(self, rows: Any) -> Any:
        import torch

        given = np.atleast_2d(np.asarray(rows, dtype=np.float32))
        return torch.from_numpy(unit_rows(given) if self._encoder.similarity == "cosine" else given)


def evaluate_mteb(
    model: Path, tasks: Sequence[Any], encoder_options: EncoderOptions, *, out: Path | None = None
) -> dict[str, Any]:
    """Evaluate an encoder on tasks of ``mteb``, in one process.

    Args:
        model: see `load_text_encoder`.
        tasks: names of tasks, or the objects.
        encoder_options: pooling, length and prompts, where they are not the model's own.
        out: JSON file to write the result to as well.

    Returns:
        ``checkpoint``, ``versions`` and ``sections``: for each task the main score of each split and subset.

    Raises:
        ConfigError: there is no such task.
        DataError: its data cannot be loaded.
    """
    import mteb

    chosen = [_task(each) if isinstance(each, str) else each for each in tasks]
    encoder = load_text_encoder(model, encoder_options)
    encoder.require_vectors("mteb compares vectors")
    sections = []
    for task in chosen:
        name = task.metadata.name
        try:
            found = mteb.evaluate(MtebEncoder(encoder), task, cache=None, show_progress_bar=False)
        except (OSError, ValueError) as error:  # of the hub, and of the reader of its data sets
            text = " ".join(str(error).split())[:300]
            raise DataError(
                f"--mteb {name}: {type(error).__name__}: {text}; its data must be in the cache of the hub (HF_HOME), "
                f"where mteb.get_task({name!r}).load_data() brings them"
            ) from None
        metrics = {
            f"{scores['hf_subset']}/{split}" if scores["hf_subset"] != "default" else split: float(scores["main_score"])
            for result in found.task_results
            for split, parts in result.scores.items()
            for scores in parts
        }
        protocol = f"mteb {mteb.__version__}, {task.metadata.main_score}; {encoder.protocol()}"
        sections.append(Section(name=name, protocol=protocol, metrics=dict(metrics)))
    result = {
        "checkpoint": str(model), "versions": provenance(), "sections": [section.model_dump() for section in sections]
    }  # fmt: skip
    if out is not None:
        write_result(out, result)
    return result


def _task(name: str) -> Any:
    import mteb

    try:
        return mteb.get_task(name)
    except KeyError:
        known = [task.metadata.name for task in mteb.get_tasks()]
        raise ConfigError(f"--mteb {name}: no such task; {did_you_mean(name, known)}") from None


def as_text(result: Mapping[str, Any]) -> str:
    """The result of `evaluate_mteb` for people."""
    return sections_as_text(result, "model", ".4f")
