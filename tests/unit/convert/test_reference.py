import pytest
import torch

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.convert.reference import embed, pool, probe_batches, require_close, tokenize
from capt.pretrain.models.capt import build_model
from tests.unit.convert.models import config, model, tokenizer


def test_the_same_weights_make_the_same_model():
    cfg = config(activation_checkpointing="full")
    plain = config()
    made = model(plain)
    built = build_model(made.state_dict(), cfg, "here")
    assert not built.training
    tokens = next(iter(probe_batches(plain, tokenizer())))
    assert torch.equal(built.embed(tokens, padded=False), made.embed(tokens, padded=False))
    assert built.mlm.weight is built.encoder.embeddings.word.weight


def test_every_problem_is_listed_in_one_line():
    state = dict(model(config()).state_dict())
    state["mlm.bias"] = state["mlm.bias"][:-1]
    state["mlm.weight"] = state["mlm.weight"] + 1
    state["surplus"] = torch.zeros(1)
    del state["encoder.layers.0.ffn_in.bias"], state["encoder.layers.2.ffn_norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        build_model(state, config(), "run/checkpoints/step-1")
    text = str(caught.value)
    assert text.startswith("run/checkpoints/step-1: ")
    assert "\n" not in text
    for part in (
        "encoder.layers.0.ffn_in.bias is missing",
        "encoder.layers.2.ffn_norm.weight is missing",
        "surplus is unknown",
        "mlm.bias has shape (639,), not (640,)",
        "mlm.weight differs from encoder.embeddings.word.weight",
    ):
        assert part in text


def test_a_second_name_may_be_left_out():
    state = dict(model(config()).state_dict())
    del state["mlm.weight"]
    built = build_model(state, config(), "here")
    assert torch.equal(built.mlm.weight, state["encoder.embeddings.word.weight"][: config().classes])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pool_is_the_model_s_own_embedding(pooling):
    cfg = config(pooling=pooling)
    made = model(cfg)
    tokens = tokenize(["short", "a longer text than that"], tokenizer(), 37)
    with torch.no_grad():
        hidden = made.encode(tokens, padded=True)
        assert (pool(made, hidden, tokens, "head") - embed(made, tokens, "head")).abs().max() < 1e-6
        by_hand = hidden[0, 0] if pooling == "cls" else hidden[0, : int((tokens[0] != 1).sum())].mean(0)
        assert (pool(made, hidden, tokens, pooling)[0] - by_hand / by_hand.norm()).abs().max() < 1e-6
        half = hidden.bfloat16()  # of weights in bf16: as an evaluation pools it, in fp32
        assert torch.equal(pool(made, half, tokens, pooling), pool(made, half.float(), tokens, pooling))


def test_tokenize_cuts_and_pads():
    tokens = tokenize(["one two three four five six seven", "x"], tokenizer(), 6)
    assert tokens.shape == (2, 6)
    assert tokens[0, 0] == tokens[1, 0] == 0
    assert tokens[0, -1] == 2
    assert tokens[1, -1] == 1


def test_probes_reach_the_last_position_and_hold_padding():
    batches = list(probe_batches(config(), tokenizer()))
    assert max(batch.shape[1] for batch in batches) == 37
    assert any(bool((batch == 1).any()) for batch in batches)
    assert all(int(batch.max()) < 640 for batch in batches)


@pytest.mark.parametrize("bad", [torch.tensor([1.0, 2.1]), torch.tensor([1.0, float("nan")]), torch.ones(3)])
def test_require_close_refuses(bad):
    with pytest.raises(CheckpointError, match=r"this thing: .*nothing written"):
        require_close("this thing", torch.tensor([1.0, 2.0]), bad)


def test_require_close_is_relative_to_the_largest_value_or_one():
    assert require_close("x", torch.tensor([100.0, 0.0]), torch.tensor([100.0, 0.0005])) == pytest.approx(5e-6)
    with pytest.raises(CheckpointError):
        require_close("x", torch.tensor([0.1, 0.0]), torch.tensor([0.1, 0.0005]))
