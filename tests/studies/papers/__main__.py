"""Print the papers' tables beside ours: the page of ``capt report``, with their published figures and layouts.

    python -m tests.studies.papers RUN... --out FOLDER

Runs or sweeps of the jobs ``glue``, ``visual``, ``capt_vl``, ``latent`` and ``ace`` get the sections of their paper. It
exits with 2 where ``capt report`` would.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from capt.pretrain.base.errors import UserError
from capt.pretrain.report.write import report
from tests.studies.papers import glue, latent, vision_language, visual, words

PAPERS = {"ace": words, "capt_vl": vision_language, "glue": glue, "latent": latent, "visual": visual}
"""The module of each task: its ``run_sections`` of runs, its ``sections`` of sweeps."""


def write_papers(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of ``folders`` with the sections of the papers, and return the path of its page."""
    return report(folders, out, PAPERS.get)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.papers", description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or sweep folders")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder for the page, curves and tables")
    given = parser.parse_args()
    try:
        print(write_papers(given.runs, given.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
