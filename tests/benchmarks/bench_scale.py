"""A rank of 8, 64 and 1,024 in a step of CAPT-Large, simulated; and a prediction of the step's time.

Bytes, memory and operations come from running the contrast and the step on tensors without data in a fake process group
(``capt/pretrain/plan``). Gloo ranks with real numbers prove the simulation where they can. The time is a
model of published constants (``capt/pretrain/plan/devices.py``). Nothing here was measured on a GPU.
"""

from __future__ import annotations

import json
import sys

from tests.benchmarks.scale_page import page
from tests.benchmarks.scale_proof import proof
from tests.benchmarks.scale_tables import FULL, OTHERS, Prediction

_PROOF = ("batch.micro=4", "contrast.queue=4096")


def main() -> int:
    """Simulate, prove, print, and say whether the proof holds."""
    proven = proof(8, _PROOF)
    prediction = Prediction([*FULL, *OTHERS])
    sys.stdout.write(json.dumps({"sections": page(prediction, proven)}) + "\n")
    return 0 if all(row["ok"] for row in proven) else 1


if __name__ == "__main__":
    raise SystemExit(main())
