"""The LSTM of the latent-variable models, on every processor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capt.pretrain.base.traits import traits


def lacks_bf16(device: torch.device) -> bool:
    """True where torch's fused LSTM cannot compute in bf16: oneDNN has none for CPUs without AVX-512."""
    return not traits().is_gpu(device) and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class LSTM(nn.LSTM):
    """torch's fused LSTM; under autocast it computes in fp32 where bf16 is not to be had (`lacks_bf16`)."""

    def forward(  # type: ignore[override]
        self, inputs: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The hidden states of all time steps, and the last hidden state and cell."""
        if not (torch.is_autocast_enabled("cpu") and lacks_bf16(inputs.device)):
            return super().forward(inputs, state)
        with torch.autocast("cpu", enabled=False):
            begin = None if state is None else (state[0].float(), state[1].float())
            return super().forward(inputs.float(), begin)
