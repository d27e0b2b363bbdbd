"""One seed for a run, spread so that what a step draws depends on the step and the rank and on nothing before it.

Dropout is drawn from torch's generator, reseeded at every step: a resumed run then draws what the uninterrupted run
drew, and no generator state has to be saved.
"""

from __future__ import annotations

import torch

from pretrain.base import distributed
from pretrain.base.randomness import derive


def seed_step(seed: int, step: int) -> None:
    """Seed torch (all devices) for this rank's step ``step``."""
    value = derive(seed, "step", step, distributed.rank())
    torch.default_generator.manual_seed(value)  # torch.manual_seed asks every backend in turn: 80 us on a CPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
