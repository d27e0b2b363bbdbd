"""The command line answers immediately: it imports nothing heavy before a command needs it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "command",
    [["pretrain", "capt_tiny", "--nproc", "2", "--dry-run"], ["config", "validate", "capt_tiny"], ["config", "schema"]],
)
def test_planning_a_whole_job_imports_no_torch_and_no_numpy(command: list[str]) -> None:
    code = (
        "import sys\nfrom capt.launcher.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\n"
        "found = [n for n in ('torch', 'deepspeed', 'ray', 'transformers', 'numpy') if n in sys.modules]\n"
        "print(found, file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stderr.strip().endswith("[]")


def seconds(*arguments: str) -> float:
    """Processor time of ``capt`` with these arguments: the best of three, so that other work here does not count."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "capt.launcher.cli", *arguments], env=env, capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used)


def test_help_takes_less_than_half_a_second() -> None:
    assert seconds("--help") < 0.5


def test_validation_takes_less_than_a_second() -> None:
    assert seconds("config", "validate", "capt_tiny") < 1.0
