"""Promises of pyproject.toml: tested ranges, extras that hold what is imported, a wheel whose core needs little."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from capt.pretrain.base.errors import EXTRA_OF, user_text
from tests.support import Capt

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenizer", "pretrain", "finetune", "launcher", "configs")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _requirements() -> Iterator[Requirement]:
    """The requirements of all extras, without the extras that an extra names itself."""
    for group in (PROJECT["dependencies"], *(EXTRAS[name] for name in EXTRAS if name not in ("all", "track"))):
        yield from (each for each in map(Requirement, group) if each.name != PROJECT["name"])


@pytest.mark.parametrize("requirement", list(_requirements()), ids=lambda requirement: requirement.name)
def test_a_range_begins_with_a_tested_release_and_ends_before_the_next_major_one(requirement: Requirement) -> None:
    """The tested release is what `make test-floor` installs or, for a package that it does not, `make install`."""
    newest, lowest = _pins("constraints.txt"), _pins("constraints-floor.txt")
    name = canonicalize_name(requirement.name)
    bounds = {bound.operator: bound.version for bound in requirement.specifier}
    assert bounds == {">=": lowest.get(name, newest[name]), "<": str(int(newest[name].split(".")[0]) + 1)}


def _pins(name: str) -> dict[str, str]:
    pins = (line.partition(";")[0].split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
    return {canonicalize_name(package): release for package, release in pins}


def test_a_search_needs_no_trainer() -> None:
    """Nothing that the extra ``search`` names, nor what these extras name, belongs to training."""
    asked, names = ["search"], set()
    while asked:
        for requirement in map(Requirement, EXTRAS[asked.pop()]):
            asked += requirement.extras if requirement.name == PROJECT["name"] else ()
            names.add(requirement.name)
    assert {"bm25s", "sentence-transformers", "transformers", "typer"} <= names
    assert not names & {"datasets", "deepspeed", "ray", "scikit-learn", "scipy", "tensorboard"}


def test_every_package_says_that_it_is_typed() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert include == ["capt*"]
    assert all(
        (ROOT / "capt" / package).is_dir() and not (ROOT / "capt" / package).is_symlink() for package in PACKAGES
    )
    assert all((ROOT / package).samefile(ROOT / "capt" / package) for package in PACKAGES)
    assert (ROOT / "capt" / "py.typed").is_file()


@pytest.mark.parametrize("package", EXTRA_OF)
def test_the_extra_that_an_error_names_holds_the_package(package: str) -> None:
    known = {
        "kubernetes": ["kubernetes"],
        "mteb": ["mteb"],
        "mlflow": ["mlflow-skinny"],
        "wandb": ["wandb"],
        "google": ["protobuf"],
        "faiss": ["faiss-cpu"],
    }
    names = known.get(package) or packages_distributions().get(package)
    if names is None:  # as in the environments of make test-floor and make test-newest
        pytest.skip(f"{package} is not installed (the extra {EXTRA_OF[package]})")
    held = {canonicalize_name(Requirement(line).name) for line in EXTRAS[EXTRA_OF[package]]}
    assert held & {canonicalize_name(name) for name in names}


def test_a_missing_package_is_one_sentence_and_an_unknown_one_is_a_fault_of_ours() -> None:
    text = user_text(ModuleNotFoundError("No module named 'ray.tune'", name="ray.tune"))
    assert text == "the package ray is not installed: pip install '.[sweep]' in a checkout"
    assert user_text(ModuleNotFoundError("No module named 'capt.x'", name="capt.x")) is None


def test_no_text_installs_an_extra_from_an_index() -> None:
    """Extras are those of the checkout or wheel at hand, not of what an index has under the name."""
    files = [path for folder in ("capt", "docs", "docker", "tests") for path in (ROOT / folder).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.name != "CHANGELOG.md"]
    texts = [path for path in files if path.suffix in (".py", ".md", ".yaml", ".yml", ".sh") or path.name == "Makefile"]
    name = PROJECT["name"]
    wrong = [str(path) for path in texts if re.search(rf"(install|f['\"]).*{name}\[", path.read_text(encoding="utf-8"))]
    assert len(texts) > 500
    assert not wrong, f"write pip install '.[extra]': {wrong}"
    assert not [path for path in texts if "DISTRIBUTION}[" in path.read_text() and path != Path(__file__)]


def test_the_version(capt: Capt) -> None:
    assert capt("--version") == (0, f"capt {version('capt-pretraining')}\n", "")
    assert version("capt-pretraining") == PROJECT["version"]


def _closure(lines: list[str]) -> set[str]:
    """The installed distributions that ``lines`` pull in, by their metadata."""
    names: set[str] = set()
    open_ = [Requirement(line) for line in lines]
    while open_:
        requirement = open_.pop()
        extras = requirement.extras or {""}
        if requirement.name in names or (
            requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        ):
            continue
        names.add(requirement.name)
        open_ += [Requirement(line) for line in distribution(requirement.name).requires or []]
    return names


def _without_links(folder: Path) -> Path:
    """Copy the checkout as git writes it with ``core.symlinks=false``: a link is a file that holds its target."""
    shutil.copytree(ROOT / "capt", folder / "capt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for package in PACKAGES:
        (folder / package).write_text(os.readlink(ROOT / package))
    return folder


def _files(package: Path) -> set[Path]:
    """The files of the package in a checkout, without what Python has compiled."""
    return {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a fresh environment: the wheel, and of what is installed here what its core asks for.

    The wheel is made of the source distribution, and that of a checkout without symbolic links.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, env = _without_links(folder / "source"), folder / "env"
    sdist = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", sdist, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packed,) = folder.glob("capt_pretraining-*.tar.gz")
    subprocess.run([*WHEEL, "--wheel-dir", str(folder), str(packed)], check=True)
    (wheel,) = folder.glob("capt_pretraining-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    for name in _closure(PROJECT["dependencies"]):
        files = distribution(name).files
        assert files is not None
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return env / "bin" / "python"


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([python, *arguments], cwd=python.parent, env=env, capture_output=True, text=True, check=False)


def test_the_core_of_the_wheel_is_the_contrastive_loss_as_readme_says(environment: Path) -> None:
    text = (ROOT / "README.md").read_text().partition("## As a library")[2]
    example = re.search(r"```python\n(.*?)```", text, flags=re.S)
    assert example is not None
    check = """
s.requires_grad_()
loss = capt_loss(s, s_hat, queue, temperature=inverted_triangle(step=0, total_steps=1000))
loss.backward()
assert loss.isfinite() and s.grad.abs().sum() > 0
import sys
print(sorted({name.partition(".")[0] for name in sys.modules} & {"deepspeed", "pydantic", "transformers", "yaml"}))
"""
    done = _run(environment, "-W", "error::UserWarning", "-c", example[1] + check)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_command_of_the_core_names_the_extra_to_install(environment: Path) -> None:
    done = _run(environment, "-m", "capt.launcher", "--help")
    assert done.returncode == 1
    assert done.stderr == "error: the package typer is not installed: pip install '.[models]' in a checkout\n"


def test_the_wheel_holds_the_shipped_jobs_and_the_marks_of_typed_packages(environment: Path) -> None:
    (site,) = environment.parents[1].glob("lib/python*/site-packages")
    assert [path.name for path in site.iterdir() if path.name in PACKAGES] == [], "one name in site-packages"
    assert (site / "capt" / "py.typed").is_file()
    assert _files(site / "capt") == _files(ROOT / "capt")


def test_a_checkout_runs_under_either_name_and_without_links_under_its_own(tmp_path: Path) -> None:
    bare = _without_links(tmp_path / "bare")
    for folder, module in ((ROOT, "pretrain"), (ROOT, "capt.pretrain"), (bare, "capt.pretrain")):
        done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "CONFIG" in done.stdout


@pytest.mark.slow
def test_an_editable_install_and_a_wheel_from_git_hold_the_package(tmp_path: Path) -> None:
    bare = _without_links(tmp_path / "bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "setuptools.pth").write_text(str(distribution("setuptools").locate_file("")))
    subprocess.run([*pip, "--no-build-isolation", "--editable", str(bare)], check=True)
    done = _run(python, "-c", "import capt.pretrain.base.errors as module; print(module.__file__)")
    assert done.stdout == f"{bare / 'capt/pretrain/base/errors.py'}\n", done.stderr
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "capt", "pyproject.toml", "README.md", "LICENSE"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], cwd=bare, check=True)
    subprocess.run([*WHEEL, "--wheel-dir", str(tmp_path), f"git+file://{bare}"], check=True)
    (wheel,) = tmp_path.glob("capt_pretraining-*.whl")
    names = {Path(name).relative_to("capt") for name in zipfile.ZipFile(wheel).namelist() if name.startswith("capt/")}
    assert names == _files(ROOT / "capt")
