"""Models that sentence-transformers computes, from folders that somebody else may have written.

Nothing in a folder is run. What the library would replace without a word (missing weights, a missing tokenizer) is
refused, and so is what fails at a long text after hours of short ones.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.errors import CheckpointError, UserError, shown
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.engine.task import Role
from capt.pretrain.models.architecture import encoder_class
from capt.pretrain.models.foreign.families import FAMILIES
from capt.pretrain.models.hf_config import SENTENCE_FILES, hub_hint, local_folder
from capt.pretrain.models.hf_folder import PICKLES, read_json, require_regular, require_weights
from capt.pretrain.models.sentence_folder import (
    ROUTERS,
    SETTINGS,
    is_classifier,
    labels_of,
    modules_of,
    require_embedder,
)

logger = logging.getLogger(__name__)

_MAX_FILES = 1000
_UNBOUNDED = 1 << 30
"""The limit of a tokenizer that has none is 10^30."""
_ROUNDING = 0.05
"""The share of the length of a vector that half precision may change."""
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_MISSING = re.compile(r"^(\S.*?)\s*\|\s*(?:\x1b\[[\d;]*m)*MISSING", re.MULTILINE)
"""A row of the report of transformers: a weight that was drawn at random."""


def load_sentence_model(path: Path) -> Any:
    """The ``SentenceTransformer`` in a folder, or of the hub model it names, on the CPU.

    Raises:
        CheckpointError: no such folder, not sentence-transformers', pickles or code in it, damaged, or no model that
            gives vectors of texts.
    """
    folder = local_folder(path, SENTENCE_FILES)
    if not (folder / "modules.json").is_file():
        what = "no modules.json; capt convert --to sentence-transformers writes such a folder"
        raise CheckpointError(f"{path}: {what if folder.is_dir() else 'no such folder' + hub_hint(path)}")
    _check(folder)
    require_embedder(folder, _keys(folder / "config.json"), _keys(folder / SETTINGS))
    from sentence_transformers import SentenceTransformer

    def probe(model: Any, text: str) -> None:
        # Without its prompts: one of them may be too long, which is said elsewhere.
        for encode in (model.encode_query, model.encode_document):
            encode([text], prompt="", show_progress_bar=False)

    # A pooler is in no vector, and many folders lack it.
    model = _loaded(path, folder, SentenceTransformer, probe, ignored="pooler")
    _warn_of_company(model, path)
    return model


def _warn_of_company(model: Any, path: Path) -> None:
    """Warn where a text has another vector beside a longer one, as in the library: padding moves its positions."""
    short, long = "a text", "a text " * 3
    with quiet_transformers():
        alone, beside = (
            model.encode(texts, prompt="", show_progress_bar=False, convert_to_numpy=True)[0]
            for texts in ([short], [short, long])
        )
    norm = float(np.linalg.norm(alone))
    change = float(np.linalg.norm(alone - beside)) / norm if norm else 0.0
    if change < _ROUNDING:
        return
    left = any(getattr(module.tokenizer, "padding_side", "") == "left" for module in _encoders(model))
    remedy = (
        ': its tokenizer pads on the left; "padding_side": "right" in tokenizer_config.json gives a text one vector'
        if left
        else ""
    )
    logger.warning(
        "%s: the vector of a text depends on the texts beside it, in sentence-transformers as well (%.0f%% of its "
        "length beside one of three times as many words)%s", path, 100 * change, remedy,
    )  # fmt: skip


def load_cross_encoder(path: Path) -> Any:
    """The ``CrossEncoder`` in a folder, or of the hub model it names, on the CPU.

    Raises:
        CheckpointError: no such folder, pickles or code in it, damaged, or no model with one score for a pair of texts.
    """
    folder = local_folder(path, SENTENCE_FILES)
    wanted = "give the folder or hub id of a cross-encoder, a model with one score for a pair of texts"
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        what = "no config.json" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{path}: {what}; {wanted}{hub_hint(path)}")
    _check(folder)
    config, kind = _keys(folder / "config.json"), _keys(folder / SETTINGS).get("model_type")
    if (folder / "modules.json").is_file() and kind != "CrossEncoder":
        raise CheckpointError(f"{path}: a {shown(kind or 'SentenceTransformer')}; {wanted}")
    if kind != "CrossEncoder" and not is_classifier(config):
        named = config.get("architectures")
        raise CheckpointError(f"{path}: {shown(named)} in config.json gives no scores; {wanted}")
    if is_classifier(config) and labels_of(config) != 1:
        raise CheckpointError(f"{path}: a classifier with {labels_of(config)} labels in config.json; {wanted}")
    from sentence_transformers import CrossEncoder

    def probe(model: Any, text: str) -> None:
        scores = model.predict([("a text", text)], show_progress_bar=False)
        if np.shape(scores) != (1,):
            raise CheckpointError(f"{path}: {np.size(scores)} scores for a pair of texts; {wanted}")

    return _loaded(path, folder, CrossEncoder, probe, ignored="-")


def _loaded(path: Path, folder: Path, kind: Any, probe: Callable[[Any, str], None], ignored: str) -> Any:
    """The model of ``folder``, which has taken a text and whose weights are all from there.

    Args:
        path: for messages.
        folder: where it is.
        kind: class of sentence-transformers.
        probe: uses the model on a text.
        ignored: part of the names of weights that may be missing.
    """
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers(), _missing_weights() as missing:
            model = kind(str(folder), device="cpu", model_kwargs={"use_safetensors": True}, **options)
        if lacking := [name for name in missing if ignored not in name]:
            raise CheckpointError(
                f"{path}: lacks weights, which would be drawn at random: {', '.join(map(shown, lacking[:3]))}"
                f"{f' and {len(lacking) - 3} more' if len(lacking) > 3 else ''}"
            )
        _require_tokenizer(model, path)
        with quiet_transformers():
            probe(model, "a text")
            _require_long(model, path, probe)
        return model
    except UserError:
        raise
    except Exception as error:  # what its many readers raise for a file that they do not like
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: sentence-transformers cannot use it: {type(error).__name__}: {text}") from None


@contextmanager
def _missing_weights() -> Iterator[list[str]]:
    """The names of weights that transformers reports as missing, while a model is loaded."""
    found: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend(_MISSING.findall(record.getMessage()))

    log, reader = logging.getLogger("transformers.modeling_utils"), Reader(logging.WARNING)
    level, propagate = log.level, log.propagate
    log.addHandler(reader)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield found
    finally:
        log.removeHandler(reader)
        log.setLevel(level)
        log.propagate = propagate


def _encoders(model: Any) -> Iterator[Any]:
    """The modules of ``model`` that read texts with a model of transformers."""
    return (module for module in model.modules() if type(module).__name__ in ("Transformer", "MLMTransformer"))


def _require_tokenizer(model: Any, path: Path) -> None:
    """Refuse a tokenizer of special tokens alone, which transformers makes where a folder has none, and one too large.

    Raises:
        CheckpointError: every word would be unknown, or some token has no row in the model.
    """
    for module in _encoders(model):
        tokenizer = module.tokenizer
        if tokenizer is None or not hasattr(tokenizer, "all_special_ids"):
            continue
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise CheckpointError(
                f"{path}: no tokenizer in it (tokenizer.json, vocab.txt): every word would be unknown"
            )
        # Tokens for pictures, as Gemma's tokenizer has in models of texts too, are in no text but one that spells them.
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        if not added.issuperset(_without_row(module)):
            rows, ids = _rows_of(module), max(tokenizer.get_vocab().values()) + 1
            raise CheckpointError(
                f"{path}: its tokenizer has {ids:,} ids and the model {rows:,} rows: it belongs to another model"
            )


def _rows_of(module: Any) -> int:
    """The rows of the word embedding of a module."""
    return int(module.auto_model.get_input_embeddings().weight.shape[0])


def _without_row(module: Any) -> list[str]:
    rows = _rows_of(module)
    return [token for token, number in module.tokenizer.get_vocab().items() if number >= rows]


def tokens_without_row(model: Any) -> list[str]:
    """The tokens that ``model`` has no row for: a text that spells one cannot be encoded."""
    tokenized = (module for module in _encoders(model) if hasattr(module.tokenizer, "all_special_ids"))
    return sorted({token for module in tokenized for token in _without_row(module)})


def _require_long(model: Any, path: Path, probe: Callable[[Any, str], None]) -> None:
    """Refuse a limit above the positions of a model that fails there, which only a long text would show."""
    for module in _encoders(model):
        room, limit = positions_of([module]), limit_of(module)
        if room is None or limit is None or limit <= room:
            continue
        try:
            probe(model, "a " * limit)
        except (IndexError, RuntimeError):
            raise CheckpointError(
                f"{path}: cuts texts to {limit:,} tokens, and the model has positions for {room:,}; set max_seq_length "
                f"in sentence_bert_config.json, or model_max_length in tokenizer_config.json, to {room}"
            ) from None


def limit_of(model: Any) -> int | None:
    """Tokens of a text at most; None where there is no limit, as for tables of vectors."""
    limit = getattr(model, "max_seq_length", None)
    return int(limit) if limit and limit < _UNBOUNDED else None


_TOKENIZED = 512
"""Texts or pairs that are tokenized together: all their tokens are in memory."""


def token_counts(model: Any, texts: Sequence[str | tuple[str, str]], limit: int | None) -> list[int] | None:
    """Return how many tokens of each text, or pair, a model reads, ``limit`` at most; None without a fast tokenizer."""
    tokenizer = getattr(getattr(model, "tokenizer", None), "_tokenizer", None)
    if tokenizer is None:
        return None
    counts: list[int] = []
    for start in range(0, len(texts), _TOKENIZED):
        rows = tokenizer.encode_batch_fast(list(texts[start : start + _TOKENIZED]))
        counts += [min(sum(row.attention_mask), limit or 1 << 30) for row in rows]
    return counts


def positions_of(model: Any) -> int | None:
    """Tokens that a model of sentence-transformers has positions for; None where it does not say."""
    config: Any = getattr(getattr(model[0], "auto_model", None), "config", None)
    room = getattr(config, "max_position_embeddings", None)
    if not isinstance(room, int) or room <= 0:
        return None
    family = FAMILIES.get(config.model_type)
    counts_from_padding = (
        family.counts_from_padding if family else config.model_type in encoder_class("roberta").hf.types
    )
    # RoBERTa and those like it count positions from the padding id on.
    return room - config.pad_token_id - 1 if counts_from_padding else room


def role_limit(model: Any, role: Role) -> int | None:
    """Tokens of a text in ``role`` at most; None where there is no limit."""
    reader = model[0]
    if type(reader).__name__ in ROUTERS:
        routes = reader.sub_modules
        route = role if role in routes else reader.default_route
        reader = next(iter(routes[route].children())) if route in routes else reader
    limit = getattr(reader, f"{role}_length", None)
    return limit if isinstance(limit, int) else limit_of(reader)


def set_limit(model: Any, length: int) -> None:
    """Cut queries and documents to ``length`` tokens."""
    model.max_seq_length = length
    for module in _encoders(model):
        for role in ("query", "document"):
            if getattr(module, f"{role}_length", None) is not None:
                setattr(module, f"{role}_length", length)


def reads_roles(model: Any) -> bool:
    """True where queries and documents of one prompt may have different vectors: they have modules of their own."""
    routes = any(type(module).__name__ in ROUTERS for module in model.modules())
    return routes or getattr(model[0], "query_expansion", None) is not None


def role_prompts(model: Any) -> dict[str, str]:
    """The prompt of each role as ``encode_query``, ``encode_document`` and ``encode`` choose it.

    The first name that the model has counts, also where its prompt is empty; without one, the default prompt does.
    """
    saved: Mapping[str, str] = model.prompts or {}
    default = saved.get(model.default_prompt_name or "", "")
    chosen = {}
    for role, names in (("query", ("query",)), ("document", _DOCUMENT_PROMPTS), ("text", ())):
        named = next((name for name in names if name in saved), None)
        chosen[role] = default if named is None else saved[named]
    return chosen


def _keys(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _check(folder: Path) -> None:
    """Refuse what the library must not open: pickles where it reads weights, links out of the folder, code in keys."""
    listed = modules_of(folder) if (folder / "modules.json").is_file() else []
    routed = any(kind in ROUTERS for kind, _ in listed)
    read_from = {folder, *(folder / name for _, name in listed)}
    # Bounded: somebody's home folder may be named by mistake.
    for number, path in enumerate(folder.rglob("*")):
        if number > _MAX_FILES:
            raise CheckpointError(f"{folder}: over {_MAX_FILES} files; name the folder of one model")
        # Safetensors beside a pickle are read in its place; a router has folders of its own within.
        if path.suffix in PICKLES and (routed or path.parent in read_from):
            require_weights(path.parent)  # names the command that converts it
        if not path.is_dir() or path.is_symlink():
            require_regular(path)
        if path.name in ("config.json", "tokenizer_config.json", "special_tokens_map.json", SETTINGS):
            read_json(path)
