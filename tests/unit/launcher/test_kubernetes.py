"""Manifests of Kubernetes: valid by the schemas of every object in them, and what the exit codes and options become."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from capt.launcher.kubernetes import apply as applying
from capt.launcher.kubernetes.settings import load_kubernetes
from capt.launcher.plan import Options
from capt.launcher.start import begin
from capt.launcher.sweep.run import run_sweep
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from tests.kubernetes import api_server, has_kubectl, kubeconfig, validate

CLUSTER: dict[str, Any] = {"image": "registry/capt:1", "pods": 2, "ranks_per_pod": 2, "cpus_per_pod": 4}
FULL = {
    **CLUSTER,
    "namespace": "team",
    "gpus_per_pod": 2,
    "memory": "64Gi",
    "volumes": [
        {"claim": "shared", "mount": "/work"},
        {"claim": "text", "mount": "/text", "path": "a", "read_only": True},
    ],
    "env": {"NCCL_SOCKET_IFNAME": "eth0"},
    "secrets": ["hub"],
    "queue": "gpus",
    "pod_spec": {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
}
JOB = ["data.files=[/text/a.txt]", "run.dir=runs/My_Run", "batch.micro=8"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that sees nothing of the cluster's files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(settings: dict[str, Any], *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """The objects that ``--dry-run`` prints."""
    Path("cluster.yaml").write_text(yaml.safe_dump(settings))
    texts: list[str] = []
    given = Options.given(launcher="kubernetes", cluster=Path("cluster.yaml"), **options)
    assert begin("capt.pretrain", "capt_tiny", [*JOB, *overrides], given, debug=False, show=texts.append) == 0
    (text,) = texts
    return list(yaml.safe_load_all(text))


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (replicated,) = objects[-1]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("form", ["jobset", "trainjob"])
@pytest.mark.parametrize("settings", [CLUSTER, FULL], ids=["least", "full"])
def test_every_object_of_a_job_is_valid(settings: dict[str, Any], form: str, elsewhere: Path) -> None:
    objects = shown({**settings, "form": form})
    validate(objects)
    kinds = ["JobSet"] if form == "jobset" else ["TrainingRuntime", "TrainJob"]
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", *kinds]
    (queue,) = {each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for each in objects[-1:]}
    assert queue == settings.get("queue")
    assert {each["metadata"].get("namespace") for each in objects} == {settings.get("namespace")}
    assert list(elsewhere.iterdir()) == [elsewhere / "cluster.yaml"], "a dry run writes nothing"


def _typo(objects: list[dict[str, Any]]) -> None:
    objects[-1]["spec"]["network"]["enableDNSHostname"] = True


def _pod_typo(objects: list[dict[str, Any]]) -> None:
    pod_of(objects)["containers"][0]["imagePullPolice"] = "Always"


def _policy(objects: list[dict[str, Any]]) -> None:
    job = objects[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] = ["2"]


@pytest.mark.parametrize("fault", [_typo, _pod_typo, _policy])
def test_the_schemas_find_a_fault(fault: Callable[[list[dict[str, Any]]], None]) -> None:
    objects = copy.deepcopy(shown(CLUSTER))
    fault(objects)
    with pytest.raises(Exception, match=r"enableDNSHostname|imagePullPolice|'2'"):
        validate(objects)


def test_what_the_pods_are_given() -> None:
    callbacks = ["run.callbacks.prometheus={host: 0.0.0.0}", "run.callbacks.theirs={}"]
    objects = shown(FULL, *callbacks, nodes=1, master_port=30000)
    pod = pod_of(objects)
    (container,) = pod["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["MASTER_ADDR"] == "my-run-node-0-0.my-run"
    assert (env["MASTER_PORT"], env["NCCL_SOCKET_IFNAME"]) == ("30000", "eth0")
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert container["resources"] == {
        "requests": {"nvidia.com/gpu": 2, "memory": "64Gi", "cpu": 4},
        "limits": {"nvidia.com/gpu": 2, "memory": "64Gi"},
    }
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["terminationGracePeriodSeconds"] == 300
    assert container["command"][1:9] == ["-m", "capt.launcher.pod", "--pods", "2", "--nodes", "1", "--ranks", "2"]
    assert container["command"][-4:] == ["capt.pretrain", "/etc/capt/job.yaml", "--merged", "--resume=auto"]
    assert {"port": 9400} in objects[1]["spec"]["ingress"][1]["ports"]
    Path("job.yaml").write_text(objects[0]["data"]["job.yaml"])
    assert load_job("job.yaml", resolved=True).run.dir == Path("runs/My_Run")


def test_another_job_is_another_config_map_and_the_same_one_is_not() -> None:
    names = [shown(CLUSTER, f"run.seed={seed}")[0]["metadata"]["name"] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"image": None}, {}, "image"),
        ({"imgae": "x"}, {}, "imgae.*image"),
        ({"env": {"HF_TOKEN": "hf_abcdefghijklmnop"}}, {}, "HF_TOKEN looks like a secret.*secrets"),
        ({"env": {"MASTER_ADDR": "x"}}, {}, "MASTER_ADDR is set for every rank"),
        ({"pod_spec": {"restartPolicy": "Always"}}, {}, "restartPolicy: set restarts"),
        ({"name": "a" * 60}, {}, "set a name of at most 54"),
        ({"name": "A"}, {}, "name"),
        ({"memory": "lots"}, {}, "memory"),
        ({}, {"nproc": 2}, "--nproc does not go with --launcher kubernetes"),
        ({}, {"master_addr": "x"}, "--master-addr does not go"),
        ({}, {"nodes": 3}, "asks for only 2 pods"),
        ({"ranks_per_pod": 40}, {}, "batch.global"),
        ({"gpus_per_pod": 1}, {}, "ranks_per_pod: 2 ranks of a pod need a GPU each, and gpus_per_pod is 1"),
        ({"namespace": "Team"}, {}, "namespace"),
    ],
)
def test_what_cannot_be_rendered_is_refused(settings: dict[str, Any], options: dict[str, Any], said: str) -> None:
    wanted = {key: value for key, value in {**CLUSTER, **settings}.items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        shown(wanted, **options)


def test_a_namespace_may_begin_with_a_digit() -> None:
    assert shown({**CLUSTER, "namespace": "2026-team"})[-1]["metadata"]["namespace"] == "2026-team"


def test_a_spare_pod_is_one_beyond_the_nodes() -> None:
    with pytest.raises(ConfigError, match="no host of the cluster file is left over; --nodes 1 keeps"):
        shown(CLUSTER, "supervise.on_lost_node=spare")
    job = shown(CLUSTER, "supervise.on_lost_node=spare", nodes=1)[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 2


def _start(cluster: dict[str, Any] = CLUSTER) -> int:
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    options = Options.given(launcher="kubernetes", cluster=Path("cluster.yaml"))
    return begin("capt.pretrain", "capt_tiny", JOB, options, debug=False, show=None)


@pytest.fixture(params=["kubectl", "client"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a cluster is reached."""
    if request.param == "client":
        pytest.importorskip("kubernetes", reason="pip install kubernetes")
        monkeypatch.setattr("shutil.which", lambda name: None)
    elif not has_kubectl():
        pytest.skip("kubectl is not installed")
    return str(request.param)


def test_a_cluster_is_given_the_manifest(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server() as (server, kept):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(elsewhere / "config", server)))
        monkeypatch.setenv("HOME", str(elsewhere))
        assert _start() == 0
    paths = [
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/my-run",
        "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/my-run",
    ]
    assert sorted(kept)[1:] == paths
    assert sorted(kept)[0].startswith("/api/v1/namespaces/team/configmaps/my-run-")
    assert kept[paths[0]]["spec"] == shown(CLUSTER)[-1]["spec"]


def test_a_job_that_is_there(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one is left running; another one is refused, and so is one that has ended, which would not start."""
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/my-run"
    remedy = r"\(kubectl delete jobset/my-run( -n team)?\), then start again: what it has saved is continued"
    with api_server() as (server, kept):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(elsewhere / "config", server)))
        monkeypatch.setenv("HOME", str(elsewhere))
        assert [_start(), _start()] == [0, 0]
        first = kept[path]["spec"]
        with pytest.raises(ConfigError, match=rf"field is immutable; stop and remove it {remedy}"):
            _start({**CLUSTER, "pods": CLUSTER["pods"] + 1})
        assert kept[path]["spec"] == first
        kept[path]["status"] = {"conditions": [{"type": "Completed", "status": "False"}]}
        assert _start() == 0
        for end in ("Completed", "Failed"):
            kept[path]["status"] = {"conditions": [{"type": end, "status": "True"}]}
            with pytest.raises(ConfigError, match=rf"has jobset/my-run already, .* ended \({end}\), .*{remedy}"):
                _start()


def test_a_cluster_without_the_operator_says_so(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes", reason="pip install kubernetes")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("KUBECONFIG", str(elsewhere / "none"))
    with pytest.raises(ConfigError, match="no Kubernetes cluster is configured here"):
        _start()
    with api_server(without="JobSet") as (server, _):
        kubeconfig(elsewhere / "none", server)
        with pytest.raises(ConfigError, match=r"knows no JobSet of jobset.x-k8s.io/v1alpha2: its operator is not"):
            _start()
    with pytest.raises(ConfigError, match="the cluster does not answer"):
        _start()


def test_without_a_client_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(applying, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"neither kubectl nor .* client here; install one \(pip install"):
        _start()
    assert os.listdir() == ["cluster.yaml"]


def test_a_sweep_is_a_ray_job(elsewhere: Path) -> None:
    Path("mine.yaml").write_text("base: capt_tiny\ndata: {files: [/text/a.txt]}\n")
    sweep = {
        "sweep": {"dir": "sweeps/a"},
        "studies": {"mine": {"base": "mine.yaml", "metric": "loss/mlm", "mode": "min"}},
        "space": {"optimizer.lr": {"grid": [0.1, 0.2]}},
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    texts = list[str]()
    for policy in (True, False):
        Path("cluster.yaml").write_text(yaml.safe_dump({**FULL, "network_policy": policy}))
        cluster = load_kubernetes(Path("cluster.yaml"))
        if policy:
            with pytest.raises(ConfigError, match=r"a sweep needs network_policy: false"):
                run_sweep("sweep.yaml", [], show=texts.append, cluster=cluster)
    assert run_sweep("sweep.yaml", [], show=texts.append, cluster=cluster) == 0
    objects = list(yaml.safe_load_all(texts[0]))
    validate(objects)
    files, ray = objects
    submitter = f"echo ray job submit -- {ray['spec']['entrypoint']} ; echo ray job logs"
    said = subprocess.run(["sh", "-c", submitter], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("ray job submit -- sh -c cd /work && exec python -m capt.launcher sweep /etc/capt/sweep")
    assert said[1:] == ["ray job logs"], "nothing of it runs in the submitter"
    assert ray["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1
    with pytest.raises(ConfigError, match="set a name of at most 47"):
        run_sweep("sweep.yaml", [], show=texts.append, cluster=cluster.model_copy(update={"name": "a" * 48}))
    inside = elsewhere / "pod"
    inside.mkdir()
    for name, text in files["data"].items():
        (inside / name).write_text(text)
    assert yaml.safe_load(files["data"]["sweep.yaml"])["sweep"]["dir"] == f"{cluster.folder}/sweeps/a"
    Path("mine.yaml").unlink()
    with pytest.raises(ConfigError, match=r"trial.workers 9: 2 pods of the cluster file hold 4 such ranks"):
        run_sweep(str(inside / "sweep.yaml"), ["sweep.trial.workers=9"], show=texts.append, cluster=cluster)
