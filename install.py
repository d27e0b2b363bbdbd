"""Fill a virtual environment with the pinned releases of everything: `make install`, or `python3 install.py .venv`.

uv does the work where the package index has it, and pip elsewhere; both take the same pins. torch goes first and by its
build: left to a resolver it becomes another release, or one with gigabytes of CUDA packages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOWEST = (3, 11)
CONSTRAINTS = HERE / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
AS_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""A setting of pip -> the variable that says the same to uv, which does not read pip's settings."""
PIP_ALONE = {"no-index", "trusted-host", "client-cert", "proxy"}
"""Settings of pip with which it does the work itself."""
SHOWN = re.compile(
    r"warning: (?!Failed to hardlink)|^ *(Resolved|Prepared|Installed|Building|Built|Installing)"
    r"|\d\d[.\d]* ?(MB|MiB)|GB|GiB",
    re.I,
)
"""Lines of uv and pip that tell what takes the time; the others are a list of packages."""


def main(arguments: Sequence[str]) -> int:
    """Install into the folder that the command line names; returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return failure("give the folder of the environment: python3 install.py .venv")
    if sys.version_info < LOWEST:
        said = f"{sys.executable} is {sys.version.split()[0]}: docs/install.md"
        return failure(f"the pinned packages need Python 3.11 or newer, and {said}")
    if os.environ.get("TORCH", "") not in ("", "cpu", "cuda"):
        return failure(f"TORCH={os.environ['TORCH']}: choose from cpu, cuda")
    folder, begun = Path(arguments[0]), time.monotonic()
    say(f"{folder}: 190 packages and 2.5 GB (7 GB with CUDA); one to three minutes with uv, about eight with pip")
    python = folder / "bin" / "python"
    if not python.exists() and not make(folder):
        return 1
    if subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode:
        return failure(f"{folder} has no pip (as uv makes environments): {python} -m ensurepip, or remove the folder")
    tool = with_uv(python) or Pip(python)
    try:
        torch = install_torch(tool, python)
        say("2 of 2: everything else")
        tool.install(torch, "-e", f"{HERE}[all,dev,docs]")
    except subprocess.CalledProcessError:
        if not isinstance(tool, Uv):
            return failure("pip could not install the packages; its lines above say why")
        say("uv could not; the same by pip")
        try:
            torch = install_torch(Pip(python), python)
            Pip(python).install(torch, "-e", f"{HERE}[all,dev,docs]")
        except subprocess.CalledProcessError:
            return failure("pip could not install the packages; its lines above say why")
    found = build_of_torch(python)
    if found is None or ("+" in torch and f"torch=={found}" != torch):
        return failure(f"{torch} was asked for and torch {found} is installed")
    size = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e9
    say(f"done in {time.monotonic() - begun:.0f} s: torch {found}, {size:.1f} GB; next: . {folder}/bin/activate")
    return 0


def make(folder: Path) -> bool:
    """Make the environment; what is left of one that could not be made would be taken for one the next time."""
    was_there = folder.exists()
    done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    if done.returncode:
        if was_there:  # with files of the user, perhaps
            (folder / "bin" / "python").unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        last = (done.stdout + done.stderr).strip().splitlines()[:1]
        failure(f"{sys.executable} -m venv {folder} failed ({' '.join(last)}); on Debian: apt-get install python3-venv")
    return not done.returncode


class Pip:
    """The tool that every environment has."""

    def __init__(self, python: Path, env: Mapping[str, str] | None = None) -> None:
        self.command: list[str] = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        self.command += ["--progress-bar", "off"]
        self.extra_index = "--extra-index-url"
        self.env = {**os.environ, **(env or {})}

    def install(self, *words: str, quiet: bool = False) -> None:
        """Install what ``words`` ask for within the pins. Raises ``CalledProcessError``."""
        command = [*self.command, "-c", str(CONSTRAINTS), *words]
        with subprocess.Popen(
            command, cwd=HERE, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            failing = False
            for line in process.stdout:
                failing = failing or line.lower().startswith("error")
                if not quiet and (failing or SHOWN.search(line)):
                    say(f"  {line.strip()[:300]}")
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)


class Uv(Pip):
    """The faster tool, told what pip's settings say."""

    def __init__(self, python: Path, env: Mapping[str, str]) -> None:
        super().__init__(python, env)
        self.command = [str(python.parent / "uv"), "pip", "install", "--python", str(python)]
        self.extra_index = "--index"


def with_uv(python: Path) -> Uv | None:
    """Return uv, installed into the environment at its pin; None where that is not possible."""
    settings = settings_of_pip(python)
    if PIP_ALONE & set(settings):
        say(f"pip is used: uv does not know its setting {', '.join(sorted(PIP_ALONE & set(settings)))}")
        return None
    if not (python.parent / "uv").exists():
        try:
            Pip(python).install("uv", quiet=True)
        except subprocess.CalledProcessError:
            say("pip is used: uv of the pinned release could not be installed")
            return None
    return Uv(python, as_uv(settings))


def settings_of_pip(python: Path) -> dict[str, str]:
    """Return pip's settings of all its files and variables, by name."""
    listed = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return parsed(listed.splitlines())


def parsed(lines: Iterable[str]) -> dict[str, str]:
    """Return the settings of `pip config list`: those of the environment win over those of its files."""
    found: dict[str, str] = {}
    for line in sorted((line for line in lines if "=" in line), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            found[key] = str(ast.literal_eval(value))
    return found


def as_uv(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say to uv what ``settings`` say to pip; what the user said to uv stays."""
    values = {AS_UV[key]: value.split() for key, value in settings.items() if key in AS_UV}
    env = {name: (",".join if name == "UV_FIND_LINKS" else " ".join)(words) for name, words in values.items()}
    env["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip: the best release of all indexes
    return {name: value for name, value in env.items() if name not in os.environ}


def install_torch(tool: Pip, python: Path) -> str:
    """Install the pinned torch, built for this machine; returns its requirement. Raises ``CalledProcessError``."""
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    found = build_of_torch(python)
    if found and f"torch=={found}".partition("+")[0] == pin:
        say(f"1 of 2: torch {found} is here and stays")
        return f"torch=={found}"
    wanted = os.environ.get("TORCH") or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if wanted == "cpu":
        say(f"1 of 2: {pin}, the build for CPUs (another: make install TORCH=cuda)")
        online = not PIP_ALONE & {"no-index"} & set(settings_of_pip(python))
        for more in ([], [tool.extra_index, CPU_INDEX])[: 1 + online]:
            try:
                tool.install(f"{pin}+cpu", *more, quiet=True)
            except subprocess.CalledProcessError:
                continue
            return f"{pin}+cpu"
        say(f"  neither the package index nor {CPU_INDEX} has {pin}+cpu: the index's own build is taken")
    else:
        say(f"1 of 2: {pin}, the build of the package index (for CPUs: make install TORCH=cpu)")
    tool.install(pin)
    return pin


def build_of_torch(python: Path) -> str | None:
    """Return the installed release of torch with its build (``2.13.0+cpu``), None without one."""
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or None


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{text}\n")


def failure(text: str) -> int:
    """Print an error; returns the exit code."""
    say(f"error: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
