"""Representations of a text in jobs of pairs: what is made of it, how two are compared, what is exported. No torch.

A text becomes one row of numbers, of a width that the job decides, whatever these numbers mean: a vector, the weights
of all words, several vectors one after another. All that moves or keeps rows (the micro-batches of a step, the ranks,
the store of vectors) knows no more of them; all that compares texts (the contrast, validation, search) asks for the
similarity of two rows. The score that a cross-encoder gives to a pair is of no row, and has no place here.

What is of vectors alone stays so, and other representations are refused it: the queue and its drift, widths, hardness
and masks by cosine, the other forms of the contrast, losses of cosines, distillation, and the measures of spread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import Section
from capt.pretrain.pairs.losses import find_loss
from capt.pretrain.registry import load_entry, look_up_row

GROUP = "capt.representations"
"""The entry-point group of representations of other distributions: name -> ``MODULE:ROW``, a `Representation`."""


@dataclass(frozen=True)
class Representation:
    """A representation of a text, beside the others in `REPRESENTATIONS`.

    Attributes:
        about: what a text becomes, for the description of ``model.representation``.
        module: ``MODULE:CLASS``, a subclass of `capt.pretrain.pairs.module.PairModule`, which makes the rows.
        similarity: ``MODULE:FUNCTION`` of rows of queries ``(m, w)``, of documents ``(n, w)`` and of the options, to
            ``(m, n)``, without parameters of its own; None: rows are unit vectors, compared by their product.
        export: ``MODULE:FUNCTION``, which writes a loaded model for other libraries, as
            `capt.pretrain.pairs.export.sentence_transformers`; None: nothing does.
        target: the value of ``capt convert --to`` that names the export.
        graph: likewise, of ``--to onnx``; None: nothing does.
        options: the section of ``model.representation_options``.
    """

    about: str
    module: str
    similarity: str | None = None
    export: str | None = None
    target: str = ""
    graph: str | None = None
    options: type[Section] = Section


REPRESENTATIONS = {
    "dense": Representation(
        "one unit vector, compared by cosine", "capt.pretrain.pairs.module:PairModule",
        export="capt.pretrain.pairs.export:sentence_transformers", target="sentence-transformers",
        graph="capt.pretrain.pairs.graph:onnx",
    )
}  # fmt: skip
"""The values of ``model.representation``."""


def find_representation(name: str) -> Representation:
    """The representation called ``name``, of this package or of `GROUP`. Raises ``ConfigError`` where there is none."""
    return look_up_row(name, REPRESENTATIONS, GROUP, "model.representation", Representation)


def module_of(job: Any) -> Any:
    """The class of the module of a job of pairs (imports torch)."""
    name = job.model.representation
    return load_entry(find_representation(name).module, GROUP, f"model.representation {name}")


def similarity_of(job: Any) -> Callable[[Any, Any], Any] | None:
    """The similarity of rows in a job of pairs (imports torch); None: they are unit vectors, compared by product."""
    name = job.model.representation
    row = find_representation(name)
    if row.similarity is None:
        return None
    function = load_entry(row.similarity, GROUP, f"model.representation {name}", "MODULE:FUNCTION")
    return functools.partial(function, options=row.options.model_validate(job.model.representation_options))


_OF_ANY = frozenset({"weight", "cached", "keep", "in_batch", "hard_negatives", "mask_duplicates", "temperature"})
"""Keys of ``contrast`` that rows of any representation have."""


def check_representation(job: Any) -> None:
    """Raise ``ConfigError`` where a job of pairs asks of its representation what that cannot do."""
    name, section = job.model.representation, job.contrast
    row = find_representation(name)
    try:
        row.options.model_validate(job.model.representation_options)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"model.representation_options.{key} of {name}: {fault['msg']}") from None
    if row.similarity is None:
        return
    is_none = f"applies to vectors, and model.representation={name} is none"
    for key in type(section).model_fields.keys() - _OF_ANY:
        value, usual = getattr(section, key), getattr(type(section)(), key)
        if value != usual:
            raise ConfigError(f"contrast.{key}={value} {is_none}: leave it out")
    if section.temperature.type == "learned":
        raise ConfigError(f"contrast.temperature.type=learned {is_none}: set constant or linear")
    if job.distillation.weight:
        raise ConfigError(f"distillation.weight={job.distillation.weight:g} {is_none}: set it to 0")
    if job.distillation.vectors is not None:
        raise ConfigError(f"distillation.vectors {is_none}: leave it out")
    for source in [job.data, *job.data.sources]:
        if source.loss != "auto":
            check_loss(name, source.loss)


def check_loss(name: str, loss: str) -> None:
    """Raise ``ConfigError`` where rows of the representation ``name`` cannot have the loss ``loss``."""
    if find_loss(loss).of_vectors and find_representation(name).similarity is not None:
        raise ConfigError(
            f"data.loss={loss} applies to vectors, and model.representation={name} is none: only losses that ask for a "
            "similarity, such as contrast, can be trained"
        )
