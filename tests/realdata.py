"""The real data that ``CAPT_DATA`` names, as studies and benchmarks ask for it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def real_data(parser: argparse.ArgumentParser, *folders: str) -> Path:
    """Return the folder that ``CAPT_DATA`` names; a command that needs ``folders`` of it ends where one is missing."""
    named = os.environ.get("CAPT_DATA")
    if not named:
        parser.error(f"CAPT_DATA must name a folder with {', '.join(folders)}")
    missing = [folder for folder in folders if not (Path(named) / folder).is_dir()]
    if missing:
        parser.error(f"CAPT_DATA names {named}, which has no {', '.join(missing)}")
    return Path(named).resolve()
