"""Commands as functions of plain values, which a file can hand to every rank: of this package, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from capt.pretrain.base.distributed import gather_objects, rank, synchronize_errors
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.stores import is_url
from capt.pretrain.commands import accepted_options, command_module, task_of
from capt.pretrain.models.hf_config import local_folder
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.registry import FOREIGN_CLASSIFIER
from capt.pretrain.retrieval.data import is_collection, read_documents, read_queries
from capt.pretrain.retrieval.encode import EncodeOptions, embed
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.evaluate import RetrievalSettings, evaluate
from capt.pretrain.retrieval.mine import mine
from capt.pretrain.retrieval.neighbors import training_text
from capt.pretrain.retrieval.options import EncoderOptions, Rules
from capt.pretrain.retrieval.rerank_evaluate import RerankSettings, evaluate_reranker
from capt.pretrain.retrieval.sources import SourceOptions, find_sources, read_sources
from capt.pretrain.retrieval.store import DTYPES, FLOATS, DType, default_store, require_dtype


def perform(work: Mapping[str, Any], progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Carry out ``work["command"]`` with the other values as its arguments; collective over all ranks.

    Raises:
        UserError: as the command.
    """
    values = dict(work)
    return _COMMANDS[values.pop("command")](progress=progress, **values)


def _encode(
    model: str, text: list[str], role: str, encoder: dict[str, Any], store: dict[str, Any],
    progress: ProgressCallback | None, run: str | None = None, column: str = "text",
) -> dict[str, Any]:  # fmt: skip
    if role not in ("query", "document", "text"):
        raise ConfigError(f"--role {role}: choose query, document or text")
    options = _options(store)
    with synchronize_errors(patient=True):
        loaded = load_text_encoder(Path(model), EncoderOptions(**encoder))
    result: dict[str, Any] = {"model": model, "protocol": loaded.protocol(), "sources": []}
    with synchronize_errors(patient=True):
        # All are counted first, for the time that is left, and because one that cannot be read is no end of hours.
        sources = [
            (source, each, sum(1 for _ in _texts(source, each, column)))
            for source in text
            for each in (("document", "query") if is_collection(Path(source)) else (role,))
        ]
        if run is not None:
            sources.append((run, role, sum(1 for _ in _lines(run))))
    for source, each, total in sources:
        texts = _lines(source) if source is run else _texts(source, each, column)
        stored = embed(loaded, texts, each, options, progress, total)  # type: ignore[arg-type]
        encoded = sum(gather_objects(stored.added))
        with synchronize_errors():
            if encoded and rank() == 0:
                stored.note(loaded.named(each))  # type: ignore[arg-type]
        result["sources"].append(
            {
                "source": source, "role": each, "texts": total, "encoded": encoded,
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


def _lines(run: str) -> Iterator[str]:
    return (line.strip() for line in training_text(Path(run)) if line.strip())


def _evaluate(
    model: str, sets: list[str], encoder: dict[str, Any], store: dict[str, Any], settings: dict[str, Any],
    out: str | None, progress: ProgressCallback | None,
) -> dict[str, Any]:  # fmt: skip
    per_query, documents_by = settings.pop("per_query"), settings.pop("documents_by", None)
    chosen = RetrievalSettings(
        dims=tuple(settings.pop("dims")),
        precisions=tuple(settings.pop("precisions")),
        per_query=Path(per_query) if per_query else None,
        documents_by=Path(documents_by) if documents_by else None,
        **settings,
    )
    return evaluate(
        Path(model), [Path(each) for each in sets], _options(store), EncoderOptions(**encoder), chosen,
        out=Path(out) if out else None, progress=progress,
    )  # fmt: skip


def _rerank(
    model: str, sets: list[str], store: dict[str, Any], settings: dict[str, Any], out: str | None,
    progress: ProgressCallback | None,
) -> dict[str, Any]:  # fmt: skip
    per_query = settings.pop("per_query")
    chosen = RerankSettings(per_query=Path(per_query) if per_query else None, **settings)
    return evaluate_reranker(
        Path(model), [Path(each) for each in sets], _options(store, FLOATS), chosen, out=Path(out) if out else None,
        progress=progress,
    )  # fmt: skip


def _mine(
    model: str, pairs: list[str], corpus: str | None, out: str, encoder: dict[str, Any], store: dict[str, Any],
    rules: dict[str, Any], cross_encoder: str | None, progress: ProgressCallback | None,
) -> dict[str, Any]:  # fmt: skip
    return mine(
        [Path(each) for each in pairs], Path(corpus) if corpus else None, Path(model), Path(out),
        _options(store, FLOATS),
        EncoderOptions(**encoder), Rules(**rules), cross_encoder=Path(cross_encoder) if cross_encoder else None,
        progress=progress,
    )  # fmt: skip


def _predict(
    model: str, file: str, out: str, options: dict[str, Any], progress: ProgressCallback | None
) -> dict[str, Any]:
    with synchronize_errors(patient=True):
        found = local_folder(Path(model))
        task = FOREIGN_CLASSIFIER if is_hf(found) else task_of(found)
        command = command_module(found, task, "predict").command
        given = accepted_options(command, task, options)
    result: dict[str, Any] = command(Path(model), Path(file), Path(out), progress=progress, **given)
    return result


def _options(given: Mapping[str, Any], dtypes: Sequence[DType] = DTYPES) -> EncodeOptions:
    root: str | None = given["store"]
    store = default_store() if root is None else root if is_url(root) else Path(root)
    options = EncodeOptions(store, require_dtype(given["dtype"], dtypes), given["tokens"])
    return replace(options, cache_bytes=given["cache_bytes"]) if given["cache_bytes"] else options


_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "encode": _encode,
    "evaluate": _evaluate,
    "mine": _mine,
    "predict": _predict,
    "rerank": _rerank,
}
