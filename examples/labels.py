"""Train a classifier on a table with the columns text and label, and classify new texts with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import capt


def main(arguments: Sequence[str]) -> list[str]:
    """Train, export, print the labels of the new texts, and return them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--new", nargs="+", default=["I want my money back."], help="texts to classify")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="where training begins")
    parser.add_argument("--out", type=Path, default=Path("runs/labels-example"))
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args(arguments)
    run = capt.train(
        "mine",
        run={"dir": given.out},
        data={"train": given.table},
        model={"init": given.model},
        schedule={"epochs": given.epochs},
    )
    predictions = capt.load(run.export(given.out / "exported", to="hf")).predict(given.new)
    labels = [str(prediction.label) for prediction in predictions]
    sys.stdout.write("".join(f"{label}\t{text}\n" for label, text in zip(labels, given.new, strict=True)))
    return labels


if __name__ == "__main__":
    main(sys.argv[1:])
