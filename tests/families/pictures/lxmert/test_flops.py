from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from capt.pretrain.models.lxmert.config import encoder_flops, step_flops
from tests.families.pictures.lxmert.support import LENGTH, REGIONS, pairs, small_config, small_model, total

N = 5


def test_the_encoder_is_what_runs() -> None:
    """The dispatcher counts a forward pass (the attention is spelt out in products when dropout is on)."""
    model = small_model(dtype=torch.float32).train()
    batch = pairs(N, padded=False, missing=False, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.encoder(batch.tokens, batch.features, batch.boxes, padded=False, present=None)
    assert counter.get_total_flops() / N == pytest.approx(encoder_flops(small_config(), LENGTH, REGIONS), rel=1e-9)
    assert model.encoder.flops(LENGTH, REGIONS) == encoder_flops(small_config(), LENGTH, REGIONS)


@pytest.mark.parametrize("contrast", [False, True])
def test_a_step_is_what_runs_but_for_what_nobody_reads(contrast: bool) -> None:
    """The last layer leaves out words that no head reads and the originals' regions, which the figure counts."""
    model = small_model(contrast, torch.float32).train()
    batch = pairs(N, padded=False, missing=False, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        total(model(**batch.inputs)).backward()
    expected = step_flops(small_config(), LENGTH, REGIONS, len(batch.masked) / N, contrast)
    assert 0.75 * expected < counter.get_total_flops() / N < 1.02 * expected
