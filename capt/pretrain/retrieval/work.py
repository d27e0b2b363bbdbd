"""Work of commands that a file can hand to every rank: a function by its name, and plain values as its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from capt.pretrain.base.distributed import gather_objects, rank, synchronize_errors
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.commands import accepted_options, command_module, task_of
from capt.pretrain.models.hf_config import local_folder
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.registry import FOREIGN_CLASSIFIER
from capt.pretrain.retrieval.data import is_collection, read_documents, read_queries
from capt.pretrain.retrieval.encode import embed
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.neighbors import training_text
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions
from capt.pretrain.retrieval.sources import SourceOptions, find_sources, read_sources
from capt.pretrain.retrieval.store import DTYPES, require_dtype


def perform(work: Mapping[str, Any], progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Call the function ``work["call"]``, ``MODULE:NAME``, with the other values as its arguments, read by their types.

    Raises:
        UserError: as the function.
    """
    module, _, name = work["call"].partition(":")
    function = getattr(import_module(module), name)
    types = get_type_hints(function)
    given = {name: TypeAdapter(types[name]).validate_python(each) for name, each in work.items() if name != "call"}
    result: dict[str, Any] = function(progress=progress, **given)
    return result


def encode_all(
    model: Path,
    text: Sequence[str],
    role: str,
    encoder_options: EncoderOptions,
    options: EncodeOptions,
    *,
    run: Path | None = None,
    column: str = "text",
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Encode texts into a store, and tell of each source how many there are. Collective.

    Args:
        model: see `load_text_encoder`.
        text: files, folders, patterns and addresses of texts.
        role: of the texts of a file.
        encoder_options: pooling, length and prompts, where they are not the model's own.
        options: how texts are encoded and kept.
        run: a run whose training text is encoded as well.
        column: where a table has its text.
        progress: called with texts encoded.
    """
    if role not in ("query", "document", "text"):
        raise ConfigError(f"--role {role}: choose query, document or text")
    require_dtype(options.dtype, DTYPES)
    with synchronize_errors(patient=True):
        loaded = load_text_encoder(model, encoder_options)
    result: dict[str, Any] = {"model": str(model), "protocol": loaded.protocol(), "sources": []}
    with synchronize_errors(patient=True):
        # All are counted first, for the time that is left, and because one that cannot be read is no end of hours.
        sources: list[tuple[str | Path, str, int]] = [
            (source, each, sum(1 for _ in _texts(source, each, column)))
            for source in text
            for each in (("document", "query") if is_collection(Path(source)) else (role,))
        ]
        if run is not None:
            sources.append((run, role, sum(1 for _ in _lines(run))))
    for source, each, total in sources:
        texts = _lines(source) if isinstance(source, Path) else _texts(source, each, column)
        stored = embed(loaded, texts, each, options, progress, total)  # type: ignore[arg-type]
        encoded = sum(gather_objects(stored.added))
        with synchronize_errors():
            if encoded and rank() == 0:
                stored.note(loaded.named(each))  # type: ignore[arg-type]
        result["sources"].append(
            {
                "source": str(source), "role": each, "texts": total, "encoded": encoded,
                "stored": len(stored), "folder": str(stored.folder), "dimension": loaded.dimension,
            }
        )  # fmt: skip
    return result


def _texts(source: str, role: str, column: str) -> Iterator[str]:
    """The texts of a file or a collection, and of what else `find_sources` knows: lines of text, rows of tables."""
    path = Path(source)
    if is_collection(path) and role == "query":
        return (text for _, text in read_queries(path))
    if path.is_file() or is_collection(path):
        return (text for _, text in read_documents(path, column))
    return (each.text for each in read_sources(find_sources([source]), SourceOptions(column, lines=True)))


def _lines(run: Path) -> Iterator[str]:
    return (line.strip() for line in training_text(run) if line.strip())


def predict_rows(
    model: Path, file: Path, out: Path, options: dict[str, Any], *, progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Write what a model predicts of the rows of a file, with those of the ``options`` that are given. Collective."""
    with synchronize_errors(patient=True):
        found = local_folder(model)
        task = FOREIGN_CLASSIFIER if is_hf(found) else task_of(found)
        command = command_module(found, task, "predict").command
        given = accepted_options(command, task, options)
    result: dict[str, Any] = command(model, file, out, progress=progress, **given)
    return result
