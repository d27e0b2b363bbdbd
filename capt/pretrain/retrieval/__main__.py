"""``python -m capt.pretrain.retrieval FILE``: one rank of ``capt encode``, ``evaluate --retrieval`` or ``mine``.

FILE, which ``capt`` writes, says what to do; rank 0 writes the result beside it. Exit codes as ``python -m
capt.pretrain``.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything else is imported
    from capt.pretrain.base.process import open_closed_streams

    open_closed_streams()

import logging
import os
import sys
from pathlib import Path

from capt.pretrain.base.errors import UserError, user_text
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.base.process import error_line
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.run_folder import BAD_INPUT, FAILED

_TIMEOUT_MINUTES = 30.0
RESULT = ".out"
"""The ending of the file of the result."""


def main(path: Path) -> int:
    """Carry out what the file ``path`` says on this rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format=f"[rank {rank}] %(message)s", stream=sys.stderr
    )
    quiet_libraries(debug=False)
    from capt.pretrain.base import distributed
    from capt.pretrain.retrieval.work import perform

    try:
        distributed.initialize(_TIMEOUT_MINUTES)
        result = perform(read_json(path))
        if distributed.rank() == 0:
            write_json(path.with_suffix(RESULT), result)
        distributed.shutdown()
    except Exception as error:
        text = user_text(error)
        if text is None:
            logging.getLogger("capt.pretrain").error("%s: %s", type(error).__name__, error, exc_info=True)
            return FAILED
        # An error that every rank has met is said once, any other by the rank that met it.
        if rank == 0 or not (isinstance(error, UserError) and error.everywhere):
            sys.stderr.write(f"{error_line(text, sys.stderr)}\n")
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    heartbeat.open_page()
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # a rank that failed must not wait for the others: the launcher ends them
