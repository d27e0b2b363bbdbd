"""Train a small encoder on text alone, from random weights, and export it. Blank lines separate documents."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import capt


def main(arguments: Sequence[str]) -> Path:
    """Train, print the loss of masked words on held-out text, and return the exported folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/text-example"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pieces", type=int, default=4096, help="of the tokenizer; a small text has fewer")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args(arguments)
    run = capt.train(
        "mlm_tiny",
        run={"dir": given.out},
        data={"files": given.text},
        tokenizer={"vocab_size": given.pieces},
        batch={"global": given.batch, "micro": min(given.batch, 16)},
        schedule={"max_steps": given.steps, "warmup_steps": max(1, given.steps // 10)},
    )
    held_out = run.metrics.get("validation/loss/mlm")  # a text of a few lines has no window to hold out
    loss, where = (run.metrics["loss/mlm"], "the text") if held_out is None else (held_out, "held-out text")
    sys.stdout.write(f"loss of masked words on {where}: {loss:.3f} nats\n")
    return run.export(given.out / "exported", to="hf")


if __name__ == "__main__":
    main(sys.argv[1:])
