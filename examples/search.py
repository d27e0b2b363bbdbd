"""Find the paragraphs of text files that are nearest to a question; nothing is trained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import capt


def main(arguments: Sequence[str]) -> list[str]:
    """Print the nearest paragraphs and return them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ask", required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="a folder, a run or a hub id")
    given = parser.parse_args(arguments)
    paragraphs = [part.strip() for path in given.files for part in path.read_text().split("\n\n") if part.strip()]
    (found,) = capt.load(given.model).search([given.ask], paragraphs, top=5)
    sys.stdout.write("".join(f"{hit.similarity:.3f}  {hit.text}\n" for hit in found))
    return [hit.text for hit in found]


if __name__ == "__main__":
    main(sys.argv[1:])
