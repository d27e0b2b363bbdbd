from __future__ import annotations

import pytest
from pydantic import ValidationError

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.config import RobertaConfig


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ("tiny", (2, 128, 2, 512)),
        ("small", (6, 256, 4, 1024)),
        ("base", (12, 768, 12, 3072)),
        ("large", (24, 1024, 16, 4096)),
    ],
)
def test_presets(size: str, shape: tuple[int, ...]) -> None:
    config = RobertaConfig.model_validate({"size": size})
    assert (config.layers, config.hidden, config.heads, config.ffn) == shape


def test_default_is_small() -> None:
    assert RobertaConfig() == RobertaConfig(size="small")


def test_explicit_field_overrides_preset() -> None:
    config = RobertaConfig(size="base", layers=4)
    assert (config.layers, config.hidden) == (4, 768)
    assert RobertaConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": "custom", "hidden": 32}, "size custom needs layers, heads, ffn"),
        ({"size": "huge"}, "size"),
        ({"heads": 3}, "heads 3 does not divide hidden 256; one of .*4, 8, 16"),
        ({"dropout": 1.0}, "dropout"),
        ({"vocab_size": 1}, "pad_id 1 is outside the vocabulary of 1"),
        ({"hiden": 32}, "hiden"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing"),
        ({"layers": 0}, "layers"),
    ],
)
def test_refuses(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RobertaConfig.model_validate(fields)


def test_derived_sizes() -> None:
    config = RobertaConfig(size="base", vocab_size=50_265, pad_vocab_to=64)
    assert (config.position_rows, config.vocab_rows) == (514, 50_304)
    assert RobertaConfig(pad_id=0).position_rows == 513
    with pytest.raises(ConfigError, match="vocab_size"):
        _ = RobertaConfig().vocab_rows


def test_vocabulary_from_tokenizer() -> None:
    assert RobertaConfig().for_tokenizer(8192, 1).vocab_rows == 8192
    assert RobertaConfig(vocab_size=9000).for_tokenizer(8192, 1).vocab_rows == 9000
    with pytest.raises(ConfigError, match="8000 is smaller than the tokenizer's 8192"):
        RobertaConfig(vocab_size=8000).for_tokenizer(8192, 1)
    with pytest.raises(ConfigError, match=r"pads with 0; set model\.pad_id: 0"):
        RobertaConfig().for_tokenizer(8192, 0)


def test_hugging_face_round_trip() -> None:
    config = RobertaConfig(size="tiny", vocab_size=99, dropout=0.2, layer_norm_eps=1e-6)
    hf = config.to_hf(bos_id=0, eos_id=2)
    assert (hf["max_position_embeddings"], hf["type_vocab_size"], hf["layer_norm_eps"]) == (514, 1, 1e-6)
    assert RobertaConfig.from_hf(hf) == config.model_copy(update={"size": "custom"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None.*valid integer"),
        ({"hidden_size": 1_000_000_000_001}, "hidden_size is 1000000000001.*less than or equal to 65536"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True.*valid integer"),
        ({"type_vocab_size": 2}, "type_vocab_size is 2"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 128"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"max_position_embeddings": 3, "pad_token_id": 3}, "leaves no position"),
        ({"pad_token_id": 99}, "pad_token_id 99 is outside vocab_size 99"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob is nan"),
    ],
)
def test_from_hf_refuses(change: dict[str, object], message: str) -> None:
    hf = RobertaConfig(size="tiny", vocab_size=99).to_hf(bos_id=0, eos_id=2)
    with pytest.raises(CheckpointError, match=message):
        RobertaConfig.from_hf({**hf, **change})


def test_from_hf_names_missing_keys() -> None:
    hf = RobertaConfig(size="tiny", vocab_size=99).to_hf(bos_id=0, eos_id=2)
    del hf["layer_norm_eps"]
    with pytest.raises(CheckpointError, match="no layer_norm_eps"):
        RobertaConfig.from_hf(hf)


@pytest.mark.parametrize("field", ["hidden", "layers", "layer_norm_eps", "max_positions"])
def test_architecture_mismatch_names_the_field(field: str) -> None:
    mine = RobertaConfig(size="tiny", vocab_size=99)
    other = mine.model_copy(update={field: getattr(mine, field) * 2})
    with pytest.raises(CheckpointError, match=rf"folder: model\.{field} is {getattr(other, field)} there"):
        mine.require_same_architecture(other, "folder")


def test_padding_is_no_architecture_but_other_ids_are() -> None:
    mine = RobertaConfig(size="tiny", vocab_size=99, pad_vocab_to=64)
    mine.require_same_architecture(RobertaConfig(size="tiny", vocab_size=99), "folder")
    mine.require_same_architecture(RobertaConfig(size="tiny", vocab_size=128), "an export with the padding in it")
    with pytest.raises(CheckpointError, match=r"folder: holds 100 rows .* set model\.vocab_size to 100"):
        mine.require_same_architecture(RobertaConfig(size="tiny", vocab_size=100), "folder")


def test_init_brings_the_sizes_that_are_not_given() -> None:
    theirs = RobertaConfig(size="tiny", vocab_size=99, pooling="mean", layer_norm_eps=1e-6)
    mine = RobertaConfig(size="base", init="folder", dropout=0.3)
    assert "layers" not in mine.model_dump()  # a run that stopped before it read the folder can be resumed
    assert RobertaConfig.model_validate(mine.model_dump()) == mine
    completed = mine.with_sizes_of(theirs, "folder")
    assert (completed.layers, completed.hidden, completed.pooling) == (2, 128, "mean")
    assert (completed.vocab_rows, completed.layer_norm_eps, completed.dropout) == (99, 1e-6, 0.3)
    again = RobertaConfig.model_validate(completed.model_dump())
    assert again == completed.with_sizes_of(theirs, "folder")
    assert RobertaConfig(size="custom", init="folder", layers=2).with_sizes_of(theirs, "folder").layers == 2
    with pytest.raises(CheckpointError, match=r"folder: model\.layers is 2 there but 12 in this job"):
        RobertaConfig(init="folder", layers=12).with_sizes_of(theirs, "folder")


@pytest.mark.parametrize("pad", [1, 64])
def test_a_model_has_at_least_the_elements_that_are_counted(pad: int) -> None:
    """A model refused for want of memory (a checkpoint's configuration may ask for terabytes) is too large for sure."""
    config = RobertaConfig(size="tiny", vocab_size=600, pad_vocab_to=pad)
    built = sum(parameter.numel() for parameter in CaptModel(config).parameters())
    assert 0.7 * built < config.elements <= built


def test_an_epsilon_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(ValidationError, match="layer_norm_eps"):
        RobertaConfig(size="tiny", layer_norm_eps=1e-308)
