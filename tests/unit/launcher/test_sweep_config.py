"""The configuration of sweeps: what is refused, which trials it makes, and that every shipped one can be run."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig

import capt.configs
from capt.finetune.visual.config import VisualJob
from capt.launcher import raycluster
from capt.launcher.kubernetes.settings import load_kubernetes
from capt.launcher.sweep.config import Sweep, load_sweep
from capt.launcher.sweep.run import run_sweep
from capt.launcher.sweep.trials import check_jobs, make_plan, set_key, trial_specs, with_initial_runs
from capt.pretrain.base.errors import ConfigError, UserError
from capt.pretrain.config import flatten
from capt.pretrain.engine.step_folders import MANIFEST
from tests.sweep_folders import add_trial

BASE = {"studies": {"capt": {"base": "capt_tiny", "metric": "loss/mlm", "mode": "min"}}}


def write(folder: Path, **parts: Any) -> str:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**BASE, **parts}))
    return str(path)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"studies": {}}, "studies"),
        ({"studies": {"../x": BASE["studies"]["capt"]}}, "a name is a folder"),
        ({"studies": {"a": {"base": "capt_tinny", "metric": "x"}}}, "did you mean the shipped job"),
        ({"sweep": {"seeds": [1, 1]}}, "a seed occurs twice"),
        ({"space": {"optimizer.lr": {"grid": [1], "choice": [1]}}}, "name exactly one of"),
        ({"space": {"optimizer.lr": {"uniform": [1, 1]}}}, "the first bound must be less"),
        ({"space": {"optimizer.lr": {"loguniform": [0, 1]}}}, "optimizer.lr"),
        ({"space": {"optimizer.lr": {"uniform": [0, 1]}}}, "search.type grid needs grid or choice"),
        ({"space": {"run.seed": {"grid": [1]}}}, "set by the sweep"),
        ({"space": {"optimizer.lr": {"grid": [1e-4, 2e-4, 0.0001]}}}, "grid has 0.0001 twice"),
        ({"space": {"contrast.weight": {"grid": [1, 1.0]}}}, "grid has 1.0 twice"),
        (
            {"space": {"optimizer.lr": {"grid": [1e-4]}}, "overrides": {"optimizer": {"lr": 1}}},
            "set in the overrides too",
        ),
        (
            {"studies": {"a": {"base": "capt_tiny", "metric": "loss/mlm"}}},
            "metric loss/mlm is the better the less it is",
        ),
        ({"search": {"type": "random"}}, "has no space"),
        ({"serach": {"type": "random"}}, "did you mean 'search'"),
        ({"trial": {"gpus": 2}}, "a rank drives one GPU"),
        ({"trial": {"gpus": 0.5, "workers": 2}}, "the ranks of a trial cannot share a GPU"),
        ({"trial": {"gpus": -0.5}}, "trial.gpus"),
        ({"trial": {"cpus": 0}}, "trial.cpus"),
        ({"trial": {"cpus": 1e999}}, "trial.cpus"),
        ({"trial": {"resources": {"GPU": 1}}}, "GPUs trial.gpus"),
        ({"trial": {"resources": {"licence": 0}}}, "trial.resources.licence"),
        ({"space": {"batch.global": {"grid": [0]}}}, "batch.global: 0"),
        ({"space": {"optimizer.lr": {"grid": [-1.0]}}}, "optimizer.lr: -1.0"),
        (
            {
                "scheduler": {"type": "pbt"},
                "space": {"optimizer.lr": {"uniform": [1e-3, 1]}},
                "overrides": {"checkpoint.every": 7},
            },
            "every to the same number",
        ),
        (
            {
                "scheduler": {"type": "pbt"},
                "space": {"optimizer.lr": {"uniform": [1e-3, 1]}},
                "trial": {"concurrent": 2},
            },
            "take turns",
        ),
        (
            {"search": {"type": "optuna"}, "scheduler": {"type": "pbt"}, "space": {"a": {"grid": [1]}}},
            "changes the parameters",
        ),
        ({"search": {"type": "random"}, "space": {"optimizer.lr": {"uniform": [-1.0, 1.0]}}}, "optimizer.lr"),
    ],
)
def test_refused(tmp_path: Path, parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        run_sweep(write(tmp_path, **parts), [], show=str)


def test_missing_inputs_are_named_before_anything_starts(tmp_path: Path) -> None:
    given_ = ["data.path=NOWHERE", f"model.init={tmp_path}", f"sweep.dir={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=r"study cola: .*NOWHERE"):
        run_sweep("glue", given_, show=str)
    assert not (tmp_path / "out").exists()


def test_trials_do_not_belong_to_the_run_of_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray hands its environment on to every trial, and each would continue the one run at W&B or MLflow."""
    before = {"WANDB_RUN_ID": "a", "WANDB_RESUME": "must", "MLFLOW_RUN_ID": "b", "WANDB_PROJECT": "p"}
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(raycluster, "check_here", lambda *_: None)

    def begins(address: str | None) -> None:
        raise ConfigError(f"at {address}: {sorted(os.environ.keys() & before.keys())}")

    monkeypatch.setattr(raycluster, "cluster", begins)
    folder = f"sweep.dir={tmp_path / 'out'}"
    with pytest.raises(ConfigError, match=r"at None: \['WANDB_PROJECT'\]"):
        run_sweep(write(tmp_path, space={"optimizer.lr": {"grid": [1e-4]}}), [folder])
    assert {name: os.environ[name] for name in before} == before
    assert "MLFLOW_RUN_ID, WANDB_RESUME, WANDB_RUN_ID not passed on" in caplog.text


def first_stage(folder: Path, steps: dict[tuple[int, int], tuple[int, ...]]) -> str:
    """A finished sweep of two queues and two seeds; ``steps`` are the checkpoints that each run has left."""
    space = {"contrast.queue": {"grid": [0, 256]}}
    write(folder, sweep={"dir": str(folder), "seeds": [1, 2]}, space=space)
    for (queue, seed), kept in steps.items():
        run = add_trial(folder, "capt", {"contrast.queue": queue}, seed, [1.0], metric="loss/mlm", mode="min")
        for step in kept:
            (run / f"checkpoints/step-{step:08d}").mkdir(parents=True)
            (run / f"checkpoints/step-{step:08d}" / MANIFEST).write_text("{}")
    return f"sweep.initial={folder}"


def test_a_sweep_begins_from_each_run_of_another_one(tmp_path: Path) -> None:
    """Every setting and seed from the *last* checkpoint of each run, the best of it or not; the rest as it was."""
    (tmp_path / "first").mkdir()
    whole = {(queue, seed): (5, 10) for queue in (0, 256) for seed in (1, 2)}
    key = first_stage(tmp_path / "first", whole)
    given_ = ["data.path=GLUE", "sweep.seeds=[3]", f"sweep.dir={tmp_path / 'second'}"]
    plain = load_sweep("glue", given_)
    sweep = with_initial_runs(load_sweep("glue", [*given_, key]))
    specs = trial_specs(sweep, "rte")
    starts = {spec.params["model.init"] for spec in specs}
    assert starts == {str(path) for path in tmp_path.glob("first/trials/capt/*/checkpoints/step-00000010")}
    assert len(specs) == 4 * len(trial_specs(plain, "rte")) == 4 * 6
    assert len({make_plan(sweep, "capt.finetune").run_dir(spec) for spec in specs}) == len(specs)
    again = tmp_path / "again.yaml"
    again.write_text(sweep.to_yaml())
    assert [s.params for s in trial_specs(load_sweep(str(again)), "rte")] == [s.params for s in specs], "resumed"
    assert with_initial_runs(plain) is plain


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({}, r"no sweep has run there"),
        ({(0, 1): (5,), (0, 2): (5,), (256, 1): (5,)}, r"3 of 4 trials are done; finish it: capt sweep .* --resume$"),
        ({(q, s): (5,) * (q == 0) for q in (0, 256) for s in (1, 2)}, r"queue=256-s1 has no checkpoint left.*=4"),
    ],
)
def test_a_sweep_that_cannot_be_begun_from_is_named(
    tmp_path: Path, steps: dict[tuple[int, int], tuple[int, ...]], said: str
) -> None:
    (tmp_path / "first").mkdir()
    key = first_stage(tmp_path / "first", steps)
    with pytest.raises(ConfigError, match=said):
        run_sweep("glue", [key, "data.path=GLUE", f"sweep.dir={tmp_path / 'second'}"], show=str)
    with pytest.raises(ConfigError, match=r"model\.init: set by sweep\.initial"):
        run_sweep("glue", [key, "data.path=GLUE", "model.init=x"], show=str)


def test_on_kubernetes_the_first_sweep_lies_where_the_pods_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(capt.configs.__path__[0]) / "cluster/kubernetes.yaml").read_text()
    text = text.replace("cpus_per_pod: 0 ", "cpus_per_pod: 8 ").replace(
        "network_policy: true ", "network_policy: false "
    )
    (tmp_path / "pods.yaml").write_text(text)
    cluster, shown = load_kubernetes(tmp_path / "pods.yaml"), list[str]()
    given_ = ["data.path=GLUE", "sweep.initial=runs/first", "sweep.dir=runs/second"]
    assert run_sweep("glue", given_, show=shown.append, cluster=cluster) == 0
    assert f"initial: {cluster.folder}/runs/first\n" in shown[0]
    assert f"dir: {cluster.folder}/runs/second\n" in shown[0]
    assert str(tmp_path) not in shown[0]


def test_parts_of_cores_and_gpus_and_what_a_cluster_calls_its_own(tmp_path: Path) -> None:
    parts = {"trial": {"cpus": 0.5, "gpus": 0.25, "resources": {"licence": 0.1}}}
    trial = load_sweep(write(tmp_path, **parts)).trial
    need = raycluster.bundle(trial.cpus, float(trial.gpus), trial.resources)
    assert need == {"CPU": 0.5, "GPU": 0.25, "licence": 0.1}
    config = ClusterConfig(
        node_group_configs=[
            NodeGroupConfig(resources={"CPU": 4, "GPU": 1, "licence": 1}, max_count=2, name="some"),
            NodeGroupConfig(resources={"CPU": 64}, max_count=-1, name="many"),
            NodeGroupConfig(resources={"CPU": 64, "GPU": 8, "licence": 9}, max_count=0, name="none"),
        ]
    )
    groups = raycluster.groups_of(config)
    assert groups == [({"CPU": 4, "GPU": 1, "licence": 1}, 2), ({"CPU": 64}, math.inf)]
    raycluster.check_room(need, 8, [{"CPU": 1}], groups)
    raycluster.check_room({"CPU": 1}, 10**6, [{"CPU": 1}], groups)
    with pytest.raises(ConfigError, match=r"9 ranks of 0.5 cores, 0.25 GPUs, 0.1 licence .*may add: 2 of 4 cores"):
        raycluster.check_room(need, 9, [{"CPU": 1}], groups)
    with pytest.raises(ConfigError, match=r"nodes \(1 core\)$"):
        raycluster.check_room(need, 1, [{"CPU": 1}], [])


def test_overrides_reach_the_sweep_or_the_jobs(tmp_path: Path) -> None:
    config = write(tmp_path, overrides={"batch.micro": 16, "run": {"log_every": 3}})
    given_ = ["sweep.dir=there", "sweep.trial.workers=2", "sweep.seeds=[7]", "run.log_every=4", "sweep.search.seed=9"]
    sweep = load_sweep(config, given_)
    assert (sweep.sweep.dir, sweep.sweep.seeds) == (Path("there").resolve(), [7])
    assert (sweep.trial.workers, sweep.search.seed) == (2, 9)
    plan = make_plan(sweep, "capt.pretrain")
    job = plan.job(trial_specs(sweep, "capt")[0])
    assert (job.run.log_every, job.batch.micro, job.run.seed, job.run.threads) == (4, 16, 7, 1)
    assert (job.checkpoint.best, job.checkpoint.best_mode) == ("loss/mlm", "min")
    with pytest.raises(ConfigError, match="not of the form"):
        load_sweep(config, ["lr"])


@pytest.mark.family
@pytest.mark.parametrize("task", ["vqa", "gqa", "nlvr2"])
def test_files_named_for_a_sweep_take_the_place_of_the_microworld(task: str) -> None:
    """``capt finetune`` does the same: the shipped jobs have a synthetic world where no file is named."""
    sweep = load_sweep(task, ["data.regions=store", "data.train=[a.json]", "data.validation=[b.json]", "model.init=x"])
    job = make_plan(sweep, "capt.finetune").job(trial_specs(sweep, task)[0])
    assert isinstance(job, VisualJob)
    assert (job.data.source, job.data.train) == ("files", [Path("a.json")])


def test_what_was_resolved_can_be_read_again(tmp_path: Path) -> None:
    sweep = load_sweep(
        write(tmp_path, space={"optimizer.lr": {"grid": [1.0e-5]}}), ["run.log_every=4", "sweep.seeds=[3]"]
    )
    again = tmp_path / "again.yaml"
    again.write_text(sweep.to_yaml())
    assert load_sweep(str(again)) == sweep


def test_a_trial_is_named_by_its_content(tmp_path: Path) -> None:
    def folders(*overrides: str, **parts: Any) -> set[Path]:
        sweep = load_sweep(write(tmp_path, space={"optimizer.lr": {"grid": [0.1, 0.2]}}, **parts), list(overrides))
        plan = make_plan(sweep, "capt.pretrain")
        return {plan.run_dir(spec) for found in check_jobs(sweep, plan).values() for spec in found}

    seeds = ["sweep.seeds=[1]"]
    few, more = folders(*seeds), folders("sweep.seeds=[1,2]")
    assert (len(few), len(more)) == (2, 4)
    assert few < more, "a seed more leaves the others' folders as they are"
    assert folders(*seeds, "run.log_every=4").isdisjoint(few)
    assert folders(*seeds, "sweep.trial.retries=3") == few


def test_drawn_settings_are_few_different_and_the_same_again(tmp_path: Path) -> None:
    space = {
        "optimizer.lr": {"loguniform": [1e-5, 1e-2]},
        "batch.global": {"choice": [32, 64]},
        "schedule.warmup_steps": {"randint": [0, 3]},
        "optimizer.weight_decay": {"uniform": [0.0, 0.1]},
    }

    def drawn(samples: int) -> list[Any]:
        search = {"type": "random", "samples": samples}
        return [
            p.params
            for p in trial_specs(load_sweep(write(tmp_path, space=space, search=search), ["sweep.seeds=[1]"]), "capt")
        ]

    few, many = drawn(5), drawn(40)
    assert many[:5] == few
    assert len({str(params) for params in many}) == 40
    assert {params["batch.global"] for params in many} == {32, 64}
    assert {params["schedule.warmup_steps"] for params in many} == {0, 1, 2, 3}
    assert all(1e-5 <= params["optimizer.lr"] <= 1e-2 for params in many)
    assert sum(params["optimizer.lr"] < 10**-3.5 for params in many) in range(10, 31), "even in the logarithm"
    space = {"batch.global": {"choice": [32, 64]}}
    assert len(drawn(40)) == 2, "there are no more"


@given(st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(), min_size=1)))
def test_flat_and_put_undo_each_other(nested: dict[str, dict[str, int]]) -> None:
    result: dict[str, Any] = {}
    for key, value in flatten(nested).items():
        set_key(result, key, value)
    assert result == nested


def test_every_key_is_described() -> None:
    def undescribed(model: Any) -> list[str]:
        return [name for name, field in model.model_fields.items() if not field.description and name != "type"]

    assert undescribed(Sweep.model_fields["trial"].annotation) == []
    assert undescribed(Sweep.model_fields["search"].annotation) == []
