"""Train an embedding model on pairs of texts that belong together, and export it for sentence-transformers.

A line of the file is ``{"query": "a question", "pos": ["its answer"]}``; other forms are in the guide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import capt


def main(arguments: Sequence[str]) -> Path:
    """Train, print the recall of held-out pairs, and return the exported folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="where training begins")
    parser.add_argument("--out", type=Path, default=Path("runs/pairs-example"))
    parser.add_argument("--batch", type=int, default=64, help="pairs a step: each is a negative of the others")
    parser.add_argument("--steps", type=int, help="in place of the number that the pairs suggest")
    given = parser.parse_args(arguments)
    steps = {} if given.steps is None else {"max_steps": given.steps, "warmup_steps": 1}
    run = capt.train(
        "capt_pairs",
        run={"dir": given.out},
        data={"files": given.pairs},
        model={"init": given.model},
        batch={"global": given.batch, "micro": min(given.batch, 32)},
        schedule=steps,
    )
    recall = run.metrics["validation/recall/to_document"]
    sys.stdout.write(f"of held-out queries {recall:.0%} find their document first\n")
    return run.export(given.out / "exported", to="sentence-transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
