from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import DataError
from capt.pretrain.models import layers
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.heads import take_rows
from tests.unit.models.support import LENGTH, assert_same, batch, gradients, small_model, train_step

DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 4] * 5)


def _case(kind: str) -> dict[str, Any]:
    return {
        "plain": {},
        "padded": {"padded": True},
        "documents": {"documents": DOCUMENTS},
        "both": {"padded": True, "documents": DOCUMENTS},
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "padded", "documents", "both"])
def test_rows_of_the_last_layer_equal_the_full_computation(kind: str) -> None:
    model = small_model().eval()
    tokens, _, positions, _ = batch(padded="padded" in _case(kind))
    rows = model.encoder(tokens, rows=positions, **_case(kind))
    full = take_rows(model.encoder(tokens, **_case(kind)), positions)
    torch.testing.assert_close(rows, full, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(full)
    assert_same(gradients(model, (rows * weight).sum()), gradients(model, (full * weight).sum()), 1e-10)


def test_padding_changes_nothing() -> None:
    model = small_model().eval()
    tokens, *_ = batch()
    longer = torch.cat([tokens[:, :-3], torch.ones(len(tokens), 3, dtype=torch.long)], 1)
    alone = model.encoder(tokens[:, :-3])
    torch.testing.assert_close(model.encoder(longer, padded=True)[:, :-3], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.encoder(tokens, padded=True), model.encoder(tokens), rtol=1e-12, atol=1e-12)


def test_padding_in_front_counts_no_positions() -> None:
    """fairseq's positions: the first real token has pad_id + 1, wherever it is."""
    model = small_model().eval()
    tokens, *_ = batch()
    shifted = torch.cat([torch.ones(len(tokens), 2, dtype=torch.long), tokens[:, :-2]], 1)
    torch.testing.assert_close(
        model.encoder(shifted, padded=True)[:, 2:], model.encoder(tokens[:, :-2]), rtol=1e-12, atol=1e-12
    )


def test_documents_do_not_see_each_other() -> None:
    model = small_model().eval()
    tokens, *_ = batch()
    changed = tokens.clone()
    changed[:, 4:9] = 50
    before = model.encoder(tokens, documents=DOCUMENTS)
    after = model.encoder(changed, documents=DOCUMENTS)
    other = DOCUMENTS[0] != 1
    assert torch.equal(before[:, other], after[:, other])
    assert not torch.allclose(before[:, ~other], after[:, ~other])
    assert not torch.allclose(model.encoder(tokens)[:, other], model.encoder(changed)[:, other])


@pytest.mark.parametrize(
    ("kind", "autocast", "fields"),
    [
        ("documents", False, {}),
        ("both", True, {}),
        ("both", False, {"pooling": "mean"}),
        ("both", False, {"activation_checkpointing": "full"}),
    ],
)
def test_attention_by_runs_equals_the_mask(
    kind: str, autocast: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, whose kernels are other ones; tests/gpu compares those."""
    padded = kind == "both"
    tokens, corrupted, positions, labels = batch(padded=padded)
    documents = DOCUMENTS.masked_fill(tokens == 1, -1) if padded else DOCUMENTS
    runs = int((documents.diff(dim=1) != 0).sum()) + len(documents)
    results, taken = [], []
    within = layers.attend_within
    monkeypatch.setattr(layers, "attend_within", lambda *args: taken.append(1) or within(*args))
    for by_runs in (False, True):
        monkeypatch.setattr(layers, "prefers_runs", lambda *_, by_runs=by_runs: by_runs)
        dtype = torch.float32 if autocast else torch.float64
        model = small_model(dtype=dtype, dropout=0.0, attention_dropout=0.0, **fields).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(tokens, corrupted, positions, labels, documents, padded, runs)
        (out.mlm_loss_sum + (out.s @ out.s_hat.T).logsumexp(0).sum()).backward()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"s": out.s, "s_hat": out.s_hat})
    assert taken
    assert_same(results[1], results[0], 5e-2 if autocast else 1e-9)


def test_runs_are_those_of_the_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0], [0, 1, 1, 2, 2]])
    runs = layers.document_runs(documents, 7)
    assert runs.offsets.tolist() == [0, 2, 4, 5, 10, 11, 13, 15]
    assert runs.longest == 5


def test_too_long_a_sequence_is_an_error() -> None:
    with pytest.raises(DataError, match=f"sequence of {LENGTH + 1} tokens is longer than model.max_positions {LENGTH}"):
        small_model().encoder(torch.full((1, LENGTH + 1), 7))


def test_initialisation() -> None:
    model = CaptModel(small_model().config.model_copy(update={"hidden": 128, "ffn": 512}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter) if "norm.weight" in name else parameter * 0), name
        elif parameter.numel() > 1000:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
    assert not model.encoder.embeddings.word.weight[1].any()


@pytest.mark.parametrize("how", ["full", "offload"])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_no_gradient(how: str, autocast: bool) -> None:
    plain = small_model(dtype=torch.float32)
    recomputing = small_model(dtype=torch.float32, activation_checkpointing=how)
    expected = train_step(plain, autocast, padded=True)
    got = train_step(recomputing, autocast, padded=True)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_checkpointing_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    compute = layers.EncoderLayer._compute

    def counted(self: layers.EncoderLayer, x: Tensor, *rest: Any) -> Tensor:
        calls.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
        return compute(self, x, *rest)

    monkeypatch.setattr(layers.EncoderLayer, "_compute", counted)
    train_step(small_model(dtype=torch.float32, activation_checkpointing="full"), True, padded=False)
    assert calls == [torch.bfloat16] * 4  # two layers, twice, in the precision of the forward pass
