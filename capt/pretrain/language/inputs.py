"""Check that the inputs of a job exist, without torch: for dry runs and ``capt config validate``.

Readers are imported where they are used, so that a job without files is checked without numpy and pyarrow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, MissingModelError, quoted
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.sources import named, source_of
from capt.pretrain.models.hf_config import hub_hint, hub_id

if TYPE_CHECKING:
    from capt.pretrain.models.architecture import EncoderConfig
    from capt.tokenizer.encode import TextTokenizer

_MARKS = ("config.json", "manifest.json", "checkpoints")
"""Names of which one is in a Hugging Face folder, in a checkpoint and in a run."""


def describe_inputs(
    data: DataConfig, init: Path | None, tokenizer: Path | None, *, trained_tokenizer: str
) -> list[str]:
    """Describe the corpus, the held-out text, the tokenizer and ``model.init``, a line each. No text is read.

    Args:
        data: the job's ``data``.
        init: the job's ``model.init``.
        tokenizer: the job's ``tokenizer.path``.
        trained_tokenizer: describes the tokenizer that the job trains where it is given neither of the two.

    Raises:
        ConfigError: no text is named.
        DataError: files, shards or the tokenizer are missing, or cannot be what they are said to be.
        CheckpointError: ``model.init`` is not a Hugging Face folder.
    """
    # A model brings its tokenizer along.
    source = tokenizer or init
    lines = []
    for name, part in data.parts():
        with named(name):
            found = _shards(part) if part.shards is not None else source_of(part).describe(part)
        lines += [f"{name}: {line}" if name else line for line in found]
    if init is not None and hub_id(init) is None:
        check_hf_folder(init)
    # Without a tokenizer one is trained, which takes text: shards hold ids alone.
    if source is None:
        for name, part in data.parts():
            if part.shards is not None and not part.files and part.source == "files":
                with named(name):
                    raise DataError(
                        "tokenizer.path is missing: data.shards alone holds no text to train a tokenizer on"
                    )
        lines.append(f"tokenizer: {trained_tokenizer}")
    elif hub_id(source) is not None:
        lines.append(f"tokenizer: that of the hub's model {source}, fetched at the start")
    else:
        from capt.tokenizer.encode import load_tokenizer

        loaded = load_tokenizer(source)
        for name, part in data.parts():
            with named(name):
                _check_shards_are_of(part, loaded)
        lines.append(f"tokenizer: {source}, {loaded.vocab_size} ids")
    return lines + ([f"model.init: {init}"] if init is not None else [])


def check_model(model: EncoderConfig, length: int, tokenizer_folder: Path | None) -> list[str]:
    """Refuse a model that does not fit its tokenizer or ``model.init``, as the job would; nothing is read of the hub.

    Args:
        model: the job's ``model``.
        length: tokens of a sequence.
        tokenizer_folder: the job's ``tokenizer.path``.

    Raises:
        UserError: what the start of the job would raise for the same files.
    """
    init = model.init
    if init is None and tokenizer_folder is None:  # nothing to read, and numpy is not needed
        return []
    from capt.pretrain.models.hf_folder import read_description
    from capt.tokenizer.encode import load_tokenizer

    if init is not None and hub_id(init) is None:
        config, own = read_description(init)
        # One on the hub is not fetched here: the model's own takes its place.
        local = tokenizer_folder is not None and hub_id(tokenizer_folder) is None
        tokenizer = load_tokenizer(tokenizer_folder) if local and tokenizer_folder is not None else own
        complete = with_sizes_of_init(model, length, config, own, tokenizer)
        complete.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    elif init is None and tokenizer_folder is not None and hub_id(tokenizer_folder) is None:
        tokenizer = load_tokenizer(tokenizer_folder)
        unused = model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad).unused_positions()
        return [] if unused is None else [f"note: {unused}"]
    return []


def with_sizes_of_init(
    model: EncoderConfig, length: int, config: EncoderConfig, own: TextTokenizer, tokenizer: TextTokenizer
) -> EncoderConfig:
    """The ``model`` of a job with the sizes of its ``init``, which has ``config`` and its ``own`` tokenizer.

    Raises:
        ConfigError: ``tokenizer`` has another vocabulary, or ``length`` is longer than the position table.
        CheckpointError: the job sets another size.
    """
    if tokenizer.backend.get_vocab() != own.backend.get_vocab():
        raise ConfigError(f"tokenizer.path: not the vocabulary of model.init {model.init}; leave tokenizer.path out")
    completed = model.with_sizes_of(config, str(model.init))
    if length > completed.max_positions:
        raise ConfigError(
            f"data.sequence_length {length} is longer than the position table of {model.init}: "
            f"at most {completed.max_positions}"
        )
    return completed


def check_hf_folder(folder: Path) -> None:
    """Raise ``CheckpointError`` unless ``folder`` holds a ``config.json`` and weights in safetensors."""
    from capt.pretrain.models.sentence_folder import encoder_folder

    if not folder.is_dir():
        raise MissingModelError(
            f"model.init: no folder {folder}; name a Hugging Face folder, or USER/NAME of the hub{hub_hint(folder)}"
        )
    folder = encoder_folder(folder)
    if not (folder / "config.json").is_file():
        is_run = (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()
        remedy = f"capt convert {quoted(folder)} OUT --to hf makes one" if is_run else "name one"
        raise CheckpointError(f"model.init {folder}: no config.json, so no Hugging Face folder; {remedy}")
    _require_weights(folder)


def _require_weights(folder: Path) -> None:
    from capt.pretrain.models.hf_folder import require_weights

    try:
        require_weights(folder)
    except CheckpointError as error:
        raise type(error)(f"model.init: {error}") from None


def _shards(data: DataConfig) -> list[str]:
    from capt.pretrain.base.stores import exists
    from capt.pretrain.data.shards import MANIFEST, ShardManifest, ShardSet

    assert data.shards is not None
    lines = []
    # Text of training must be there; held-out text may be.
    for split in ("train", "validation"):
        if isinstance(data.shards, Path):
            place: Path | str = data.shards / split
            there = split == "train" or (data.shards / split).is_dir()
        else:
            place = f"{data.shards.rstrip('/')}/{split}"
            there = split == "train" or exists(f"{place}/{MANIFEST}")
        if there:
            shards = ShardSet.open(place).manifest if isinstance(place, Path) else ShardManifest.read_url(place)
            lines.append(f"corpus: {place}, {shards.documents:,} documents, {shards.tokens:,} tokens")
    return lines


def _check_shards_are_of(data: DataConfig, tokenizer: TextTokenizer) -> None:
    if data.shards is not None:
        from capt.pretrain.data.shards import ShardManifest, ShardSet

        if isinstance(data.shards, Path):
            ShardSet.open(data.shards / "train").check_tokenizer(tokenizer)
        else:
            url = f"{data.shards.rstrip('/')}/train"
            ShardSet(url, ShardManifest.read_url(url)).check_tokenizer(tokenizer)


def describe_initial_model(init: Path) -> str:
    """Say in one line where the model of ``model.init`` comes from; no tensor is read.

    Raises:
        CheckpointError: ``model.init`` is neither a run or checkpoint of ours nor a Hugging Face folder, or its encoder
            or tokenizer is one that the job would refuse.
    """
    from capt.pretrain.models.foreign.families import read_description
    from capt.pretrain.models.hf_folder import is_hf
    from capt.pretrain.models.sentence_folder import encoder_folder

    if hub_id(init) is not None:
        return f"the hub's model {init}, fetched at the start"
    if not init.is_dir():
        raise MissingModelError(
            f"model.init: no folder {init}; name a run, a checkpoint or a Hugging Face folder{hub_hint(init)}"
        )
    if is_hf(init):
        read_description(init)
        _require_weights(encoder_folder(init))
    elif not any((init / mark).exists() for mark in _MARKS):
        raise CheckpointError(f"model.init {init}: neither a run or checkpoint of ours nor a Hugging Face folder")
    return str(init)
