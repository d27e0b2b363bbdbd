"""The ``capt`` command and ``python -m capt.launcher``: says which extra to install where the command line cannot
load."""

from __future__ import annotations

import sys

from capt.pretrain.base.errors import missing_package
from capt.pretrain.base.process import spin_briefly


def main() -> None:
    """Run ``capt`` with the arguments of this process, and exit."""
    spin_briefly()
    try:
        from capt.launcher.cli import main as run
    except ModuleNotFoundError as error:
        text = missing_package(error)
        if text is None:
            raise
        sys.exit(f"error: {text}")
    run()


if __name__ == "__main__":
    main()
