"""The keys of a Hugging Face ``config.json`` of an encoder as a typed record with bounds. No torch."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from capt.pretrain.base.errors import CheckpointError, MissingModelError, shown
from capt.pretrain.config.base import PathField
from capt.pretrain.models.sentence_folder import module_files

# Hub ids in place of Hugging Face folders: ``USER/NAME``, or ``USER/NAME@REVISION`` for a branch or commit.
#
# The hub is never asked for a path that may be a folder of this machine: one that begins with ``/``, ``.`` or ``~``
# (`source_path`), has more or fewer than two parts, or whose first part is a folder. Only weights (safetensors), JSON
# and tokenizer files are fetched, no pickle and no code, into the hub client's own cache; ``HF_HOME``,
# ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` mean what they mean there.


logger = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")

_SNAPSHOT = re.compile(r"models--(?P<user>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})")

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "sentence_*_config.json", "modules.json",
)  # fmt: skip
ENCODER_FILES = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "capt_head.safetensors", "bottleneck.safetensors", "bottleneck.json", *TOKENIZER_FILES,
)  # fmt: skip
SENTENCE_FILES = (
    *ENCODER_FILES, "config_sentence_transformers.json",
)  # fmt: skip
"""The files that each kind of reader opens, as patterns of the hub client; `local_folder` adds those of modules."""


def source_path(text: str | Path) -> Path:
    """A path as it was typed: a leading ``./``, which `pathlib` drops, says that no hub id is meant."""
    return Path.cwd() / text if str(text).startswith("./") else Path(text)


FolderOrId = Annotated[
    PathField, BeforeValidator(lambda value: str(source_path(value)) if isinstance(value, str) else value)
]
"""A field of a configuration: a folder, or a hub id."""


def is_hub_id(text: str) -> bool:
    """Return whether ``text`` has the form ``USER/NAME`` or ``USER/NAME@REVISION``."""
    return _ID.fullmatch(text) is not None


def hub_id(path: Path) -> tuple[str, str | None] | None:
    """The repository and the revision that ``path`` names, or None where it is or may be a path of this machine."""
    match = _ID.fullmatch(str(path))
    if match is None or path.exists() or path.is_symlink():
        return None
    # A first part that is a folder here means a path, also one that is mistyped; a revision has the hub alone.
    if match["revision"] is None and Path(path.parts[0]).exists():
        return None
    return match["repo"], match["revision"]


def hub_hint(path: Path) -> str:
    """Return the end of a message about a missing folder that looks like a hub id: the name that the hub is asked for.

    It is empty for every other path.
    """
    match, first = _ID.fullmatch(str(path)), path.parts[0] if path.parts else ""
    if match is None or match["revision"] is not None or path.exists() or not Path(first).exists():
        return ""
    return f" (a folder {first} is here, so this is a path; the hub's model is {path}@main)"


def origin(path: Path, folder: Path) -> str:
    """The public name of ``path``, which was read from ``folder``: the hub id with its revision, or a folder's name.

    A folder of the hub client's cache (``models--USER--NAME/snapshots/REVISION``) is its hub id as well.
    """
    cached = _SNAPSHOT.fullmatch("/".join(folder.absolute().parts[-3:]))
    if cached is not None:
        return f"{cached['user']}/{cached['name']}@{cached['revision']}"
    return path.name


def local_folder(path: Path, files: tuple[str, ...] = ENCODER_FILES) -> Path:
    """``path`` itself, or the folder of the hub client's cache with ``files`` of the hub model that ``path`` names.

    Raises:
        MissingModelError: the hub has no such model or revision, or cannot be reached and has no copy in its cache.
    """
    from huggingface_hub import constants

    named = hub_id(path)
    if named is None:
        _say_which(path, Path(constants.HF_HUB_CACHE))
        return path
    folder = _snapshot(*named, files, constants.HF_HUB_CACHE)
    # The encoder of a sentence-transformers folder, and what follows it, may be in any folder within.
    if "config.json" in files and (folder / "modules.json").is_file() and (more := module_files(folder)):
        _snapshot(named[0], folder.name, (*files, *more), constants.HF_HUB_CACHE)
    return folder


@functools.cache
def _say_which(path: Path, cache: Path) -> None:
    """Log that a folder is taken where the hub client keeps a model of the same name."""
    if is_hub_id(str(path)) and path.is_dir() and (cache / f"models--{str(path).replace('/', '--')}").is_dir():
        logger.info("%s: the folder here, and not the hub's model of this name, which is %s@main", path, path)


@functools.cache
def _snapshot(repo: str, revision: str | None, files: tuple[str, ...], cache: str) -> Path:
    """Download once in each process, so that every reader in it sees the same revision."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    path = repo if revision is None else f"{repo}@{revision}"
    offline = constants.HF_HUB_OFFLINE  # before release 2 the client lists the files even of a pinned revision
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(files), local_files_only=offline))
    except GatedRepoError:
        problem = "the hub gives it only to those who have accepted its terms: do so there, then `hf auth login`"
    except RepositoryNotFoundError:
        problem = "no such folder, and no such model on the hub (a private one needs `hf auth login`)"
    except RevisionNotFoundError:
        problem = f"the hub's model has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "the hub client is offline" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        problem = f"no such folder; {why}, and {cache} has no whole copy (hf download {repo} makes one)"
    except HFValidationError:
        problem = "neither a folder nor a hub id"
    except HfHubHTTPError as error:  # its text may quote the request
        problem = f"the hub answers with status {error.response.status_code}"
    except HTTPError as error:
        problem = f"the hub cannot be reached ({type(error).__name__})"
    else:
        logger.info("%s: from the hub, revision %s (%s@%s pins it)", path, folder.name, repo, folder.name)
        return folder
    raise MissingModelError(f"{path}: {problem}")


Keys = TypeVar("Keys", bound="HFConfig")

_Rate = Annotated[float, Field(ge=0, lt=1)]


class HFConfig(BaseModel):
    """The keys that decide an encoder. Bounds are far above any encoder in use and far below what hangs a machine."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int = Field(ge=1, le=1 << 16)
    num_hidden_layers: int = Field(ge=1, le=1000)
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    intermediate_size: int = Field(ge=1, le=1 << 19)
    max_position_embeddings: int = Field(ge=3, le=1 << 20)
    pad_token_id: int = Field(ge=0, lt=1 << 20)
    hidden_dropout_prob: _Rate
    attention_probs_dropout_prob: _Rate
    layer_norm_eps: float = Field(gt=0, le=1)
    initializer_range: float = Field(gt=0, le=100)


class RobertaKeys(HFConfig):
    """RoBERTa's, which has one token type."""

    type_vocab_size: Literal[1]


def list_names(names: Iterable[str]) -> str:
    """The first five ``names`` of tensors for an error message; those of a foreign file may have any length."""
    every = list(names)
    first = [name if name.isprintable() and len(name) <= 100 else shown(name) for name in every[:5]]
    return ", ".join(first) + (f" and {len(every) - 5} more" if len(every) > 5 else "")


def parse_hf_config(config: Mapping[str, Any], source: str, record: type[Keys], what: str) -> Keys:
    """Check the mapping ``config``, which was read from ``source``, and return it as a ``record``.

    Args:
        config: the keys of a ``config.json``.
        source: where they come from, for error messages.
        record: the keys that are needed, with their bounds.
        what: the family's name, for error messages.

    Raises:
        CheckpointError: a key is missing, of another type or out of bounds; the message names it.
    """
    missing = [key for key in record.model_fields if key not in config]
    if missing:
        raise CheckpointError(f"{source} has no {', '.join(missing)}; a {what} encoder needs them")
    try:
        parsed = record.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise CheckpointError(
            f"{source}: {key} is {shown(config[key])}, which describes no {what} encoder: {message}"
        ) from None
    if parsed.pad_token_id >= parsed.vocab_size:
        raise CheckpointError(f"{source}: pad_token_id {parsed.pad_token_id} is outside vocab_size {parsed.vocab_size}")
    if parsed.hidden_size % parsed.num_attention_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {parsed.num_attention_heads} does not divide "
            f"hidden_size {parsed.hidden_size}"
        )
    return parsed
