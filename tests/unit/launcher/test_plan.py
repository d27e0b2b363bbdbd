"""From options to a checked launch: ``plan``, ``start`` and the choice of the backend."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import yaml

from capt.launcher.backends import backend
from capt.launcher.plan import Launch, Options
from capt.launcher.start import begin, resume
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import load_job, load_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine.run_folder import Status, is_finished, write_status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("node-1 slots=2\nnode-2 slots=2\n")
    return tmp_path


def shown(*overrides: str, config: str = "capt_tiny", debug: bool = False, **options: object) -> str:
    """Output of ``--dry-run``."""
    texts: list[str] = []
    code = begin("capt.pretrain", config, overrides, Options(**options), debug=debug, show=texts.append)  # type: ignore[arg-type]
    assert code == 0
    return "\n".join(texts)


def test_a_dry_run_shows_everything_and_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    text = shown("run.dir=r", "batch.micro=4", nproc=2, master_port=12345, debug=True)
    assert "# local: 2 ranks (localhost x 2)" in text
    assert "# batch.global 64 = batch.micro 4 x accumulation 8 x 2 ranks" in text
    assert '"train_micro_batch_size_per_gpu": 4' in text
    for rank in (0, 1):
        assert f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1" in text
    (name,) = set(re.findall(r"r/job-[0-9a-f]{8}\.yaml", text))
    assert text.count(f"-m capt.pretrain {name} --merged --debug") == 2
    assert f"# file that would be written: {name}\n" in text
    assert "\nbatch:\n  global: 64\n  micro: 4\n" in text
    assert "MASTER_PORT=12345" in text
    assert sorted(folder.rglob("*")) == before


def test_a_dry_run_over_hosts_shows_the_environment_and_each_command(folder: Path) -> None:
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    text = shown("run.dir=r", "batch.micro=4", hostfile=Path("hosts"))
    assert "# ssh: 4 ranks (node-1 x 2, node-2 x 2)" in text
    assert text.count("GLOO_SOCKET_IFNAME=eth0") == 1  # through stdin, in no command line
    places = re.findall(r"# on (\S+):\nRANK=(\d) LOCAL_RANK=(\d) WORLD_SIZE=4 .*MASTER_ADDR=node-1", text)
    assert places == [("node-1", "0", "0"), ("node-1", "1", "1"), ("node-2", "2", "0"), ("node-2", "3", "1")]
    assert not (folder / "r").exists()


def test_hosts_beyond_those_that_run_the_job_are_spares(folder: Path) -> None:
    overrides = ("run.dir=r", "supervise.on_lost_node=spare")
    assert "# ssh: 2 ranks (node-1 x 2; spare: node-2)" in shown(*overrides, hostfile=Path("hosts"), nodes=1)
    with pytest.raises(ConfigError, match="no host of hosts is left over; --nodes 1 keeps the last one as a spare"):
        shown(*overrides, "batch.micro=4", hostfile=Path("hosts"))


def test_a_dry_run_through_deepspeed_shows_the_environment_and_its_file(folder: Path) -> None:
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    text = shown("run.dir=r", "batch.micro=4", hostfile=Path("hosts"), launcher="deepspeed")
    assert "# deepspeed: 4 ranks (node-1 x 2, node-2 x 2)" in text
    assert f"# file that would be written: {folder}/r/launch.env\n" in text
    assert text.count("GLOO_SOCKET_IFNAME=eth0") == 2
    assert f"--hostfile {folder}/hosts --master_addr node-1" in text
    assert not (folder / "r").exists()


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_other_launchers_are_shown(folder: Path, launcher: str) -> None:
    assert f"# {launcher}: " in shown("run.dir=r", "batch.micro=4", launcher=launcher)


def test_a_hostfile_of_this_host_alone_runs_locally(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2\n")
    assert "# local: 2 ranks" in shown("run.dir=r", hostfile=Path("hosts"))


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (("batch.micro=1",), {"nproc": 3}, "leaves one of 3 ranks without a sequence"),
        (("batch.global=2",), {"hostfile": Path("hosts")}, "4 ranks"),
        (("batch.global=12",), {"launcher": "slurm"}, "16 ranks"),
        ((), {"hostfile": Path("nowhere")}, "no hostfile nowhere"),
        ((), {"launcher": "local", "hostfile": Path("hosts")}, "this host only"),
        (
            (),
            {"launcher": "mpi"},
            "--launcher: unknown launcher 'mpi'; known: deepspeed, kubernetes, local, ray, slurm, srun, ssh, torchrun",
        ),
        (("batch.micro=4",), {"nodes": 3, "hostfile": Path("hosts")}, "names only 2 hosts"),
        (("batch.micro=4",), {"nodes": 1, "nproc": 2}, "--launcher local has none"),
        ((), {"launcher": "ssh"}, "--launcher ssh needs --hostfile"),
        ((), {"nproc": 1_000_000}, "--nproc: 1000000: input should be less than or equal to 512"),
        ((), {"master_port": 65536}, "--master-port: 65536"),
        ((), {"hostfile": Path("ho\nsts")}, "--hostfile: a path holds no line break"),
        ((), {"cluster": Path("a\tb")}, "--cluster: a path holds no line break"),
        (("engine.deepspeed_extra.zero_optimisation.stage=2",), {}, "did you mean 'zero_optimization'"),
        ((), {"launcher": "ray", "nproc": 512}, "lower --nproc, or name a cluster: RAY_ADDRESS="),
        (("batch.micro=4",), {"launcher": "torchrun", "hostfile": Path("hosts")}, "its own host only"),
        (("optimizer.lrr=1",), {}, "did you mean 'lr'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    folder: Path, overrides: tuple[str, ...], options: dict[str, object], says: str
) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as error:
        begin("capt.pretrain", "capt_tiny", ["run.dir=r", *overrides], Options.given(**options), debug=False, show=None)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


def test_a_used_run_folder_is_refused(folder: Path) -> None:
    (folder / "r").mkdir()
    (folder / "r" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="capt resume r"):
        shown("run.dir=r")


def test_the_same_command_again_ends_with_0_where_its_run_is_finished(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def again(*overrides: str) -> int:
        words = ["run.dir=r", "run.resume=auto", "batch.micro=8", *overrides]
        return begin("capt.pretrain", "capt_tiny", words, Options(), debug=False, show=None)

    (folder / "r").mkdir()
    job = load_job("capt_tiny", ["run.dir=r", "batch.micro=8"])
    (folder / "r" / "config.yaml").write_text(job_to_yaml(job))
    write_status(folder / "r", Status(state="done", step=job.schedule.max_steps, exit_code=0))
    before = {path: path.read_bytes() for path in (folder / "r").iterdir()}
    with caplog.at_level(logging.INFO):
        assert again() == 0
    assert "r is finished: all steps of this job are done" in caplog.text
    with pytest.raises(ConfigError, match=r"optimizer.lr 0.001 -> 0.1, run.seed 1 -> 2; .*capt resume r"):
        again("optimizer.lr=0.1", "run.seed=2")
    with pytest.raises(ConfigError, match=r"holds a run of another job: task.type 'capt_language' -> 'latent'"):
        begin("capt.pretrain", "ptb/vae", ["run.dir=r", "run.resume=auto"], Options(), debug=False, show=None)
    assert {path: path.read_bytes() for path in (folder / "r").iterdir()} == before
    (folder / "r" / "status.json").write_text('{"state": "do')  # of a host that lost its power; a rank replaces it
    assert not is_finished(folder / "r", job)


@pytest.mark.parametrize("launcher", ["ssh", "torchrun", "deepspeed"])
def test_chosen_hosts_and_slots_reach_every_launcher(folder: Path, launcher: str) -> None:
    (folder / "hosts").write_text("node-1 slots=2\nnode-2 slots=4\nnode-3 slots=2\n")
    options = Options.given(launcher=launcher, hostfile=Path("hosts"), include="node-3@node-2:1,3")
    job = load_job("capt_tiny", ["run.dir=r"])
    made = backend(launcher).plan(Launch("capt.pretrain", ("capt_tiny",), job, options))
    assert [(host.name, host.slots) for host in made.hosts] == [("node-2", 2), ("node-3", 2)]
    if launcher == "deepspeed":
        assert "--include node-3@node-2:1,3" in str(made.commands[0])
    else:
        seen = {command.host: command.env.get("CUDA_VISIBLE_DEVICES") for command in made.commands}
        assert seen == {"node-2": "1,3", "node-3": None}


def test_chosen_slots_of_this_host(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=4\nnode-2 slots=4\n")
    text = shown("run.dir=r", hostfile=Path("hosts"), include="localhost:0,3")
    assert "# local: 2 ranks (localhost x 2)" in text
    assert text.count("CUDA_VISIBLE_DEVICES=0,3") == 2
    with pytest.raises(ConfigError, match=r"name it with --hostfile|chooses hosts of a --hostfile"):
        shown("run.dir=r", include="localhost")


def test_the_processes_must_fit_the_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "# local: 2 ranks" in shown("run.dir=r")
    with pytest.raises(ConfigError, match="2 visible GPUs"):
        shown("run.dir=r", nproc=4)


def run_folder(folder: Path, **launch: object) -> Path:
    run = folder / "r"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(load_mapping("capt_tiny", ["run.dir=r", "batch.micro=4"])))
    (run / "launch.json").write_text(json.dumps(launch))
    return run


def resumed(run: Path, *overrides: str, checkpoint: str | None = None, **options: object) -> str:
    texts: list[str] = []
    given = Options(**options)  # type: ignore[arg-type]
    resume("capt.pretrain", run, overrides, given, checkpoint=checkpoint, debug=False, show=texts.append)
    return "\n".join(texts)


def test_resume_launches_as_before(folder: Path) -> None:
    run = run_folder(folder, launcher="local", nproc=4)
    text = resumed(Path("r"), "optimizer.lr=1e-4")
    assert "# local: 4 ranks" in text
    assert text.count("-m capt.pretrain r/config.yaml optimizer.lr=1e-4 --resume\n") == 3
    assert (run / "launch.json").read_text() == '{"launcher": "local", "nproc": 4}'


def test_resume_looks_at_what_it_reads(folder: Path) -> None:
    run_folder(folder, launcher="local", nproc=1)
    assert "# corpus: the docstrings" in resumed(Path("r"))
    with pytest.raises(DataError, match=r"data\.files: nowhere\.txt does not exist"):
        resumed(Path("r"), "data.files=nowhere.txt")
    with pytest.raises(ConfigError, match="data names no text"):
        resumed(Path("r"), "data.source=null")


def test_resume_on_another_world(folder: Path) -> None:
    run_folder(folder, launcher="deepspeed", hostfile=str(folder / "hosts"))
    assert "# deepspeed: 4 ranks" in resumed(Path("r"))
    assert "# local: 1 rank" in resumed(Path("r"), nproc=1)


def test_resume_of_a_run_that_another_launcher_started(folder: Path) -> None:
    (run_folder(folder) / "launch.json").unlink()
    assert "# local: 1 rank" in resumed(Path("r"))


def test_resume_of_a_moved_run_stays_in_it(folder: Path) -> None:
    run_folder(folder).rename(folder / "moved")
    assert "moved/config.yaml run.dir=moved --resume" in resumed(Path("moved"))
    (folder / "moved").rename(folder / "run #2")  # which YAML reads as "run"
    assert """'run #2/config.yaml' 'run.dir="run #2"' --resume""" in resumed(Path("run #2"))


def test_resume_from_an_older_checkpoint(folder: Path) -> None:
    run = run_folder(folder)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        resumed(run, checkpoint="step-00000002")
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002" / "manifest.json").touch()
    assert "--resume --checkpoint step-00000002" in resumed(run, checkpoint="step-00000002")


def test_resume_from_the_best_checkpoint_names_it(folder: Path) -> None:
    """A restart compares the names of later checkpoints with it, and went back to the best one again and again."""
    run = run_folder(folder, launcher="local", nproc=1)
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000002").mkdir(parents=True)
    (checkpoints / "step-00000002" / "manifest.json").touch()
    (checkpoints / "best").symlink_to("step-00000002")
    assert "--resume --checkpoint step-00000002" in resumed(run, checkpoint="best")


def test_resume_needs_a_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        resumed(Path("nowhere"))


def test_options_survive_their_file(folder: Path) -> None:
    options = Options(launcher="deepspeed", hostfile=Path("hosts"), cluster=Path("slurm"), master_port=1234)
    (folder / "run").mkdir()
    (folder / "run" / "launch.json").write_text(options.to_json())
    again = options.model_copy(update={"hostfile": folder / "hosts"})  # absolute; "slurm" is the name of a shipped file
    assert Options.read(folder / "run" / "launch.json") == again


INJECTIONS = (
    *("127.0.0.1;touch X;", "$(touch X)", "`touch X`", "a b", "a|b", "a&b", "a'b", 'a"b', "a>b", "-oProxyCommand=id"),
    *("a\nb", "a\tb", "", " ", "*", "user@host", "a/b", "h\u00f6st", "fe80::1%eth0", "::1;touch X", "[::1]", "a" * 300),
)


@pytest.mark.parametrize("address", INJECTIONS)
def test_no_address_reaches_a_shell_that_is_not_one(folder: Path, address: str) -> None:
    (folder / "b").mkdir()
    with pytest.raises(ConfigError, match=r"--master-addr: .*not a host"):
        Options.given(master_addr=address)
    run = run_folder(folder, launcher="deepspeed", hostfile=str(folder / "hosts"), master_addr=address)
    with pytest.raises(ConfigError, match=r"launch\.json: master_addr: .*not a host"):
        resumed(run)


@pytest.mark.parametrize("address", ["node-1", "10.0.0.3", "a_b.example", "fe80::1", "::1"])
def test_names_and_addresses_are_taken(address: str) -> None:
    assert Options.given(master_addr=address).master_addr == address


def test_a_launch_file_names_no_file_of_the_run_or_of_somebody_else(folder: Path) -> None:
    run = run_folder(folder, launcher="slurm", cluster=str(folder / "r" / "evil.yaml"))
    (run / "evil.yaml").write_text("setup: ['touch X']")
    (folder / "x").mkdir()
    for cluster in (str(run / "evil.yaml"), "r/evil.yaml", str(folder / "x" / ".." / "r" / "evil.yaml")):
        (run / "launch.json").write_text(json.dumps({"launcher": "slurm", "cluster": cluster}))
        with pytest.raises(ConfigError, match="pass --cluster yourself"):
            resumed(run)
    (run / "launch.json").write_text(json.dumps({"launcher": "deepspeed", "hostfile": str(folder / "hosts")}))
    assert "# deepspeed" in resumed(run)
    os.chown(run / "launch.json", 12345, -1)
    with pytest.raises(ConfigError, match="written by another user"):
        resumed(run)


def test_a_launch_file_is_a_small_regular_file(folder: Path) -> None:
    run = run_folder(folder)
    (run / "launch.json").unlink()
    os.mkfifo(run / "launch.json")
    with pytest.raises(ConfigError, match=r"launch\.json: not a regular file"):
        resumed(run)
    (run / "launch.json").unlink()
    with (run / "launch.json").open("wb") as f:
        f.truncate(8 << 30)
    with pytest.raises(ConfigError, match=r"launch\.json: over 65,536 bytes"):
        resumed(run)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        '{"nprocs": 2}',
        '{"nproc": -2}',
        '{"nproc": "x"}',
        '{"nproc": true}',
        "\0",
        "\ufeff",
        "[" * 9000,
        '{"nproc": ' + "9" * 5000,
    ],
)
def test_a_damaged_launch_file_is_named(folder: Path, content: str) -> None:
    run = run_folder(folder)
    (run / "launch.json").write_text(content)
    with pytest.raises(ConfigError, match=r"launch\.json.*pass --nproc, --hostfile"):
        resumed(Path("r"))
