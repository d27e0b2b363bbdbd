"""Read a Hugging Face folder that somebody else wrote, without running or following anything in it.

``trust_remote_code=False`` was not a boundary in several releases (CVE-2026-4372, CVE-2026-5241), and shard names and
FIFOs in a folder were (CVE-2026-69112). So ``config.json`` is read here and never handed to ``transformers``; only
safetensors are opened; only regular files with plain names inside the folder are read. No torch until tensors are.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from capt.pretrain.base import files as safe_files
from capt.pretrain.base.errors import CheckpointError, MissingModelError, shown
from capt.pretrain.models.architecture import EncoderConfig, encoder_of_type, model_types
from capt.pretrain.models.hf_config import list_names
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_JSON_BYTES = 4_000_000
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that could run code when they are opened."""

TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer that could name code, and are read with `read_json` before the tokenizer is."""

_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be read; quantized weights are not numbers that could be copied into a model."""

BUFFER = re.compile(r"(.*\.)?((position|token_type)_ids|num_batches_tracked)")
"""Integers that old releases of transformers wrote beside the weights."""


class _Index(BaseModel):
    """``model.safetensors.index.json``: in which shard each tensor is."""

    model_config = ConfigDict(strict=True, extra="ignore")
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$", max_length=255)]]


TO_SAFETENSORS = (
    'python -c "import glob, torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for f in '
    "glob.glob('FILES') for k, v in torch.load(f, weights_only=True).items()}, 'model.safetensors')\""
)
"""The command that turns pickles of tensors, and of nothing else, into safetensors: every tensor under its name."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARD = re.compile(r"-\d+-of-\d+(?=\.)")
_STATES = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)\b.*|rng_state_\d+.*")
"""Pickles that a trainer writes beside the weights."""

_RUNS_CODE = re.compile(r"auto_map|trust_remote_code|custom_(pipelines|generate)|_?(attn|experts)_implementation.*")
"""Keys through which a configuration names code to import, a kernel to download, or a wish to be trusted."""
_NO_CODE = (None, False, True, "eager", "sdpa")
"""Values of such keys that name none: flags of old releases, and the implementations that torch itself has."""


_ADAPTERS = "adapter_config.json"
"""The settings of adapters of peft, which have no ``config.json`` of their own."""


def is_hf(folder: Path) -> bool:
    """True for a folder with the ``config.json`` of an encoder, which our checkpoints and runs do not have.

    Raises:
        CheckpointError: the folder holds adapters of peft alone, or several encoders (see `encoder_folder`).
    """
    found = (encoder_folder(folder) / "config.json").is_file()
    if not found and (folder / _ADAPTERS).is_file():
        raise CheckpointError(
            f"{folder}: adapters of peft without their model; merge them into it (merge_and_unload), and save that "
            "and its tokenizer"
        )
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of ``folder/config.json``, of an encoder that can be pretrained.

    Raises:
        CheckpointError: the file is missing, not plain JSON, names code to run, or describes another architecture.
    """
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    encoder = encoder_of_type(kind)
    if encoder is None:
        problem = f"is {shown(kind)}" if "model_type" in config else "is missing"
        expected = " or ".join(map(repr, model_types()))
        raise CheckpointError(f"{path}: model_type {problem}; an encoder that can be pretrained has {expected}")
    for key, allowed in encoder.hf.fixed.items():
        # Any other value is another model, which our encoder would compute wrongly.
        if key in config and config[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(f"{path}: {key} is {shown(config[key])}; a {encoder.hf.what} encoder has {expected}")
    return config


def read_description(folder: Path) -> tuple[EncoderConfig, TextTokenizer]:
    """The configuration and the tokenizer of an encoder that can be pretrained; no tensor is read.

    Raises:
        CheckpointError: as `read_config`, `encoder_folder` and `require_fit`, or a size is impossible.
        DataError: its tokenizer cannot be read.
    """
    folder = encoder_folder(folder)
    keys = read_config(folder)
    encoder = encoder_of_type(keys["model_type"])
    assert encoder is not None, "read_config refuses other encoders"
    config = encoder.from_hf(keys, str(folder / "config.json"))
    read_tokenizer_configs(folder)
    tokenizer = load_tokenizer(folder)
    require_fit(folder, keys, tokenizer)
    return config, tokenizer


def require_fit(folder: Path, keys: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
    """Compare the tokenizer of ``folder`` with the ``keys`` of its ``config.json``.

    Raises:
        CheckpointError: they pad with different ids, or the tokenizer has ids without a row of the word embedding.
    """
    pad, rows = keys.get("pad_token_id"), keys.get("vocab_size")
    if pad not in (None, tokenizer.special.pad):
        raise CheckpointError(
            f"{folder}: the model pads with {shown(pad)}, its tokenizer with {tokenizer.special.pad}: "
            "pad_token_id in config.json, or the tokenizer, belongs to another model; take both from the same one"
        )
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        last = tokenizer.vocab_size - 1
        raise CheckpointError(
            f"{folder}: its tokenizer has {last + 1} ids, and the model {rows} rows (vocab_size in config.json), none "
            f"for {shown(tokenizer.backend.id_to_token(last))}; remove the tokens that were added, or give them rows: "
            "resize_token_embeddings of transformers"
        )


def read_tokenizer_configs(folder: Path) -> None:
    """Raise ``CheckpointError`` where a file beside the tokenizer is not plain JSON, or names code to run."""
    for name in TOKENIZER_CONFIGS:
        if (folder / name).exists():
            read_json(folder / name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file of a sane size.

    Raises:
        CheckpointError: the file is missing, not such a file, or a key in it names code to run.
    """
    require_regular(path)
    value = safe_files.read_json(path, limit=_MAX_JSON_BYTES, error=CheckpointError)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    try:
        _refuse_code(value, path, "")
    except RecursionError:
        raise CheckpointError(f"{path}: nested too deeply") from None
    return value


def _refuse_code(value: Any, path: Path, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if _RUNS_CODE.fullmatch(key) and (inner not in _NO_CODE or (key == "trust_remote_code" and inner)):
                raise CheckpointError(
                    f"{path}: key {shown(where + key)} names code to run or to fetch; this is refused, remove the key"
                )
            _refuse_code(inner, path, f"{where}{key}.")
    elif isinstance(value, list):
        for item in value:
            _refuse_code(item, path, where)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Of a folder that has both, transformers reads the former, whichever is older; so is it here, with a warning. What
    DistributedDataParallel (``module.``) and torch.compile (``_orig_mod.``) put into names is left out.

    Raises:
        CheckpointError: no safetensors (pickles are never opened), a shard that is not a regular file of this folder,
            a damaged file, or an index that disagrees with its shards.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() and index.exists():
        logger.warning("%s: read as transformers does; %s beside it is not: remove one of them", whole, index.name)
    if (folder / _ADAPTERS).exists():
        logger.warning("%s: the adapters of peft beside the weights are not read", folder)
    # Without either file the reader of the whole one says what is missing.
    if whole.exists() or not index.exists():
        return _unwrapped(read_tensor_file(whole))
    try:
        weight_map = _Index.model_validate(read_json(index)).weight_map
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{shown(part)}]" if i else str(part) for i, part in enumerate(first["loc"]))
        problem = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}"
        raise CheckpointError(f"{index}: {where} {problem}; a shard is a plain *.safetensors file name") from None
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map is empty")
    import torch

    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        shard = read_tensor_file(folder / name)
        twice = sorted(key for key in tensors.keys() & shard.keys() if not torch.equal(tensors[key], shard[key]))
        if twice:
            raise CheckpointError(
                f"{folder / name}: {list_names(twice)} are in another shard too, and differ; remove one of both"
            )
        tensors.update(shard)
    if tensors.keys() != weight_map.keys():
        unequal = sorted(tensors.keys() ^ weight_map.keys())
        raise CheckpointError(f"{index}: the index and its shards name different tensors: {list_names(unequal)}")
    return _unwrapped(tensors)


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the model itself, where it was saved inside DistributedDataParallel or compiled."""
    found = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    if all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    return found if len(found) == len(tensors) else tensors


def require_weights(folder: Path, name: str = "model.safetensors") -> None:
    """Raise ``CheckpointError`` unless ``folder`` has the file of weights ``name``, or an index of its shards."""
    # A link that leads nowhere is there: its reader says so.
    if any(path.exists() or path.is_symlink() for path in (folder / name, folder / "model.safetensors.index.json")):
        return
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLES and not _STATES.fullmatch(p.name))
    # A pickle beside the weights is ignored; alone it is named, with the way to convert it.
    if pickles:
        first = next((each for each in pickles if each.startswith("pytorch_model")), pickles[0])
        named, command = first, TO_SAFETENSORS.replace("FILES", _SHARD.sub("-*", first))
        # Somebody else's name may not become code in a command that is copied.
        if not _PLAIN.fullmatch(first):
            named, command = shown(first), "rename it, in letters and digits"
        raise CheckpointError(
            f"{folder}: holds no {name} but {named}, a pickle, which could run code when it is opened; in that folder: "
            f"{command}"
        )
    if any(folder.glob("model-*-of-*.safetensors")):
        raise CheckpointError(f"{folder}: its shards lack model.safetensors.index.json, which says what is in them")
    raise MissingModelError(f"{folder / name}: no such file; a Hugging Face folder needs it")


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file. Raises ``CheckpointError`` as :func:`read_tensors` does."""
    require_weights(path.parent, path.name)
    with open_tensors(path) as file:
        unusable = [
            f"{kind} {name}"
            for name in file.keys()  # noqa: SIM118 (a safetensors handle is not a dict)
            if (kind := file.get_slice(name).get_dtype()) not in _DTYPES and not BUFFER.fullmatch(name)
        ]
        if unusable:
            raise CheckpointError(f"{path}: weights are {', '.join(_DTYPES)} here, not {list_names(unusable)}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if empty := [name for name, tensor in tensors.items() if not tensor.numel()]:
        raise CheckpointError(
            f"{path}: tensors without elements ({list_names(empty)}), as ZeRO 3 leaves where nothing gathers its "
            "weights; save the model again with stage3_gather_16bit_weights_on_model_save"
        )
    # One NaN would spread to every loss, long after the file is closed.
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not BUFFER.fullmatch(name) and not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name!a} holds weights that are not finite; name another model")
    return tensors


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """``safetensors.safe_open`` of a regular file of this folder. Raises ``CheckpointError`` for a damaged one."""
    require_regular(path)
    with safe_files.open_regular(path, error=CheckpointError):  # names a pointer of Git LFS
        pass
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError, MemoryError) as error:  # RuntimeError: torch cannot map the file
        raise CheckpointError(f"{path}: not a whole safetensors file: {' '.join(str(error).split())}") from None


def require_regular(path: Path) -> None:
    """Refuse FIFOs, devices and links, but for the links into ``blobs/`` that make up a hub cache's snapshot folder."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise MissingModelError(f"{path}: no such file; a Hugging Face folder needs it") from None
    if stat.S_ISLNK(mode):
        if not safe_files.is_in_hub_cache(path):
            raise CheckpointError(f"{path}: is a link out of the folder; copy the file it means into the folder")
        mode = path.stat().st_mode if path.exists() else 0
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: not a regular file")
