"""The registry of launchers: those of other distributions work as the built-in ones do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.launcher.backends import LAUNCHERS, backend
from capt.launcher.plan import Options
from capt.launcher.start import begin
from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError

TOY = """
from capt.launcher.ssh import Host
from capt.launcher.plan import Command, End, Plan

SPARES = True


def plan(launch):
    return Plan("toy", (Host("moon", 2),), (Command(("echo", *launch.arguments)),), launch.files)


def start(launch, plan):
    (launch.run_dir / "started").write_text(" ".join(plan.commands[0].argv))
    return End(0)
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed distribution with one good launcher and two bad ones."""
    folder = tmp_path / "packages"
    (folder / "theirs-1.dist-info").mkdir(parents=True)
    (folder / "toy_launcher.py").write_text(TOY)
    (folder / "half_launcher.py").write_text("def plan(launch): ...")
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(
        "[capt.launchers]\ntoy = toy_launcher\nhalf = half_launcher\nabsent = no_such_launcher\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    registry.entry_point_values.cache_clear()
    yield folder
    registry.entry_point_values.cache_clear()
    for name in ("toy_launcher", "half_launcher"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_built_in_launcher_is_whole(name: str) -> None:
    assert all(callable(getattr(backend(name), function)) for function in ("plan", "start"))


def test_a_launcher_of_another_distribution_plans_and_starts(distribution: Path) -> None:
    texts: list[str] = []
    options = Options.given(launcher="toy", nodes=1)
    overrides = ["run.dir=r", "batch.micro=4"]
    assert begin("capt.pretrain", "capt_tiny", overrides, options, debug=False, show=texts.append) == 0
    assert "# toy: 2 ranks (moon x 2)" in texts[0]
    assert not Path("r").exists()
    assert begin("capt.pretrain", "capt_tiny", overrides, options, debug=False, show=None) == 0
    assert "--merged" in Path("r/started").read_text()
    assert json.loads(Path("r/launch.json").read_text())["launcher"] == "toy"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tyo", r"--launcher: unknown launcher 'tyo'; did you mean.*toy"),
        ("half", r"--launcher half: its module 'half_launcher' has no function start"),
        ("absent", r"--launcher absent: the entry point 'no_such_launcher' of capt\.launchers cannot be imported"),
    ],
)
def test_what_is_no_launcher_is_one_sentence(distribution: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        begin("capt.pretrain", "capt_tiny", ["run.dir=r"], Options.given(launcher=name), debug=False, show=print)


def test_spares_are_of_launchers_that_have_them(distribution: Path) -> None:
    has_spares = {name for name in (*LAUNCHERS, "toy") if getattr(backend(name), "SPARES", False)}
    assert has_spares == {"ssh", "slurm", "srun", "kubernetes", "toy"}
    with pytest.raises(ConfigError, match="--launcher local has none"):
        begin("capt.pretrain", "capt_tiny", [], Options.given(launcher="local", nodes=1), debug=False, show=print)
