"""Measure two models and BM25 on one search: a BEIR folder with queries, documents and judgements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import capt


def main(arguments: Sequence[str]) -> list[Any]:
    """Print the figures of each model as JSON, and return them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("beir", help="corpus.jsonl, queries.jsonl and qrels/test.tsv")
    parser.add_argument("models", nargs=2, help="folders, runs or hub ids")
    given = parser.parse_args(arguments)
    figures = [capt.evaluate(model, retrieval=[given.beir], bm25=True) for model in given.models]
    sys.stdout.write(f"{json.dumps(dict(zip(given.models, figures, strict=True)), indent=1, default=str)}\n")
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
