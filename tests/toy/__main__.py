"""``python -m tests.toy CONFIG ...``: one rank of a job of the toy task."""

import os

from capt.pretrain.__main__ import run_process
from capt.pretrain.registry import TASKS

if __name__ == "__main__":
    TASKS["toy"] = "tests.toy"
    os._exit(run_process())
