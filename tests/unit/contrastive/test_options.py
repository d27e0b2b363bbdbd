"""An object of options travels from the configuration to the kernel; no layer between names what is in it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.load import load_job
from capt.pretrain.contrast import ContrastOptions, ShardedQueue, capt_loss
from capt.pretrain.contrastive import term
from capt.pretrain.contrastive.term import ContrastTerm, options_of
from capt.pretrain.contrastive.views import Views
from capt.pretrain.engine.run import _sequences_of_a_loss
from tests.unit.contrast.support import unit

OTHER: dict[str, Any] = {
    "queue_share": 0.5,
    "hardness": 2.0,
    "hardness_in_batch": 3.0,
    "mask_margin": 0.1,
    "mask_relative": 0.2,
    "matryoshka": (8, 4),
    "matryoshka_weights": (1.0,),
    "in_batch": "local",
    "reduction": "sum",
    "precision": "bf16x3",
}
"""Another value than the default of every key that is an option."""

WITH: dict[str, Any] = {"matryoshka_weights": {"matryoshka": (4,)}}
"""Settings that a key needs."""


@dataclass(frozen=True)
class _Toy(ContrastOptions):
    """An option of tomorrow."""

    toy: float = 0.0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ContrastOptions]:
    """The options that each sharded softmax gets."""
    module = importlib.import_module("capt.pretrain.contrast.info_nce")
    found: list[ContrastOptions] = []
    make = module.SoftmaxContext

    def record(**arguments: Any) -> Any:
        found.append(arguments["options"])
        return make(**arguments)

    monkeypatch.setattr(module, "SoftmaxContext", record)
    return found


def test_a_new_option_reaches_the_softmax_and_nothing_between_knows_it(seen: list[ContrastOptions]) -> None:
    rows = unit(4, 8, seed=0)
    capt_loss(rows, rows, temperature=0.1, options=_Toy(toy=3.0), impl="dense")
    capt_loss(rows, rows, temperature=0.1, options=_Toy(), toy=4.0)
    assert seen == [_Toy(toy=3.0, impl="dense"), _Toy(toy=4.0)]


def test_a_new_option_is_read_from_the_key_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Section(ContrastSection):
        toy: float = 5.0

    monkeypatch.setattr(term, "ContrastOptions", _Toy)
    assert options_of(Section()) == _Toy(toy=5.0)


def test_every_option_of_a_job_reaches_the_softmax(
    seen: list[ContrastOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {field.name for field in fields(ContrastOptions)} & set(ContrastSection.model_fields)
    assert keys == set(OTHER)
    rows = unit(4, 8, seed=0, dtype=torch.float32)
    for name, value in OTHER.items():
        assert getattr(ContrastOptions(), name) == ContrastSection.model_fields[name].default != value
        contrast = ContrastTerm(ContrastSection(queue=64, **WITH.get(name, {}), **{name: value}), 8, 4)
        contrast.loss(Views(rows, rows, torch.arange(4), 0.1), step=10**9)
        assert getattr(seen[-1], name) == value
        assert seen[-1].equal_rows
        contrast.loss(Views(rows, rows, torch.arange(4), 0.1, only=torch.tensor([0, 2])), step=10**9)
        assert not seen[-1].equal_rows  # ranks may choose different numbers of samples
    with monkeypatch.context() as patch:
        patch.setattr(term, "distributed", SimpleNamespace(world_size=lambda: 3))
        for batch, equal in ((None, False), (6, True)):
            contrast.loss(Views(rows, rows, torch.arange(4), 0.1), step=0, batch=batch)
            assert seen[-1].equal_rows == equal


def test_an_option_without_a_queue_to_use_it_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match=r"hardness is a number of 0 or more, got -1.0"):
        ContrastOptions(hardness=-1.0)
    with pytest.raises(ConfigError, match=r"queue_share is a number of 0 or more, .* got 1.0 with in_batch=none"):
        ContrastOptions(queue_share=1.0, in_batch="none")
    rows = unit(4, 8, seed=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'hardnes'"):
        capt_loss(rows, rows, ShardedQueue(8, 8), temperature=0.1, hardnes=1.0)


@pytest.mark.parametrize("job", ["capt_tiny", "pairs_tiny"])
@pytest.mark.parametrize(("cached", "expected"), [("auto", [64] * 3), ("true", [64] * 3), ("false", [16, 32, 64])])
def test_a_cached_contrast_compares_the_step_on_any_number_of_ranks(job: str, cached: str, expected: list[int]) -> None:
    """A resume on other ranks then needs no warning of another loss."""
    settings = ["batch.global=64", "batch.micro=16", f"contrast.cached={cached}"]
    if job == "pairs_tiny":
        settings += ["data.files=a.jsonl", "model.init=runs/a"]
    loaded = load_job(job, settings)
    assert [_sequences_of_a_loss(loaded, ranks) for ranks in (1, 2, 4)] == expected
