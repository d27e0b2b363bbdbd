"""Manifests of Kubernetes: valid by the schemas of every object in them, and what the exit codes and options become."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from capt.launcher.kubernetes import apply as applying
from capt.launcher.kubernetes.manifests import to_manifest
from capt.launcher.kubernetes.settings import NOT_TEXT, OWN_FIELDS, load_kubernetes
from capt.launcher.plan import Options
from capt.launcher.start import begin
from capt.launcher.sweep.run import run_sweep
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from tests.kubernetes import (
    ROOT,
    admitted,
    api_server,
    fields_without_text,
    has_kubectl,
    kubeconfig,
    plain_texts,
    pods,
    read_by_kubectl,
    unrestricted,
    validate,
)  # fmt: skip

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


def printed(settings: dict[str, Any], *overrides: str, **options: Any) -> str:
    """The manifest that ``--dry-run`` prints."""
    Path("cluster.yaml").write_text(json.dumps(settings))
    texts: list[str] = []
    given = Options.given(launcher="kubernetes", cluster=Path("cluster.yaml"), **options)
    assert begin("capt.pretrain", "capt_tiny", [*JOB, *overrides], given, debug=False, show=texts.append) == 0
    (text,) = texts
    return text


def shown(settings: dict[str, Any], *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """The objects of that manifest."""
    return list(yaml.safe_load_all(printed(settings, *overrides, **options)))


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (replicated,) = objects[-1]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


def swept(settings: dict[str, Any], *overrides: str, **options: Any) -> str:
    """The manifest of a sweep that ``--dry-run`` prints."""
    Path("mine.yaml").write_text("base: capt_tiny\ndata: {files: [/text/a.txt]}\n")
    sweep = {
        "sweep": {"dir": "sweeps/My_Run"},
        "studies": {"größe": {"base": "mine.yaml", "metric": "loss/mlm", "mode": "min"}},
        "space": {"optimizer.lr": {"grid": [0.1, 0.2]}},
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    Path("cluster.yaml").write_text(json.dumps(settings))
    texts = list[str]()
    cluster = load_kubernetes(Path("cluster.yaml"))
    assert run_sweep("sweep.yaml", list(overrides), show=texts.append, cluster=cluster, **options) == 0
    return texts[0]


@pytest.mark.parametrize("settings", [CLUSTER, FULL], ids=["least", "full"])
def test_every_object_of_a_job_is_valid(settings: dict[str, Any], elsewhere: Path) -> None:
    objects = shown(settings)
    validate(objects)
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "JobSet"]
    (queue,) = {each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for each in objects[-1:]}
    assert queue == settings.get("queue")
    assert {each["metadata"].get("namespace") for each in objects} == {settings.get("namespace")}
    assert list(elsewhere.iterdir()) == [elsewhere / "cluster.yaml"], "a dry run writes nothing"


def test_every_pod_passes_the_standard_restricted() -> None:
    """KubeRay's submitter as well, which would not by itself; a cluster file may add to a pod's security."""
    added = {"pod_spec": {"securityContext": {"supplementalGroups": [7]}, "imagePullSecrets": [{"name": "mine"}]}}
    for settings in (CLUSTER, FULL, {**CLUSTER, **added}):
        found = [*pods(shown(settings)), *pods(list(yaml.safe_load_all(swept(settings))))]
        assert len(found) == 1 + 3
        assert [unrestricted(pod) for pod in found] == [[]] * 4
        assert {pod["spec"]["automountServiceAccountToken"] for pod in found} == {False}
    assert [pod["spec"]["imagePullSecrets"] for pod in found] == [[{"name": "mine"}]] * 4
    assert [pod["spec"]["securityContext"]["supplementalGroups"] for pod in found] == [[7]] * 4


def test_the_standard_restricted_refuses_each_fault() -> None:
    """The checker sees a fault in any of the controls."""
    pod = {"spec": copy.deepcopy(pod_of(shown(CLUSTER)))}
    whole: list[dict[str, Any]] = [
        {"hostNetwork": True},
        {"hostPID": True},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"securityContext": {"runAsNonRoot": True}},
        {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}},
        {"securityContext": {**pod["spec"]["securityContext"], "runAsUser": 0}},
        {"securityContext": {**pod["spec"]["securityContext"], "sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        {"securityContext": {**pod["spec"]["securityContext"], "seLinuxOptions": {"type": "spc_t"}}},
        {"initContainers": [{"name": "x"}]},
    ]
    own: list[dict[str, Any]] = [
        {"securityContext": {"capabilities": {"drop": ["ALL"]}}},
        {"securityContext": {"allowPrivilegeEscalation": False}},
        {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["KILL"]}}},
        {"ports": [{"hostPort": 1}]},
        {"readinessProbe": {"httpGet": {"host": "10.0.0.1"}}},
    ]
    (container,) = pod["spec"]["containers"]
    faults = [{**pod["spec"], **fault} for fault in whole]
    faults += [{**pod["spec"], "containers": [{**container, **fault}]} for fault in own]
    assert [fault for fault in faults if not unrestricted({"spec": fault})] == []


AMBIGUOUS = [
    *["y", "N", "yes", "No", "on", "OFF", "true", "False", "null", "~", "", " ", "1e-4", "12e03", "+1e3", "1E5", "1e5"],
    *["0o14", "014", "0x1F", "0x1f", "0b11", "1_000", "1:30", "190:20:30", ".5", "+.inf", ".NaN", "-0", "+1", "7", "0"],
    *[
        "2026-11-28",
        "2026-11-28T07:00:00Z",
        "=",
        "<<",
        "!",
        "&",
        "*",
        "?",
        "-",
        ":",
        "#",
        "%",
        "@",
        "`",
        "|",
        ">",
        "[]",
    ],
    *["{}", "---", "...", "'a", '"b', "a: b", "a #b", " a", "a ", "1,000", "$(HOME)", "$$HOME", "é"],
]
"""Texts that a reader of YAML 1.1 or 1.2 takes for something else where they have no quotes."""


def test_every_text_of_a_manifest_is_a_text() -> None:
    """Manifests are read by PyYAML, and by kubectl where it is installed, which reads as Go does."""
    env = {f"V{index}": word for index, word in enumerate(AMBIGUOUS)} | {
        "y": "n",
        "N": "1e3",
        "Null": "null",
        "_1": "1",
    }
    for word in ("y", "null"):
        settings = {
            **CLUSTER,
            **{"env": env, "secrets": [word, "1.5e3", "0o14", "1e-4"], "namespace": word, "queue": word, "image": word},
            "volumes": [{"claim": word, "mount": "/work", "path": "1e-4"}, {"claim": "0x1f", "mount": "/1e4"}],
            "pod_spec": {"nodeSelector": {each: each for each in AMBIGUOUS}, "priorityClassName": word},
        }
        for manifest in (printed(settings, f"run.dir=runs/{word}"), swept(settings, f"sweep.dir=sweeps/{word}")):
            objects = list(yaml.safe_load_all(manifest))
            assert plain_texts(manifest) == []
            for pod in pods(objects):
                assert pod["spec"]["nodeSelector"] == {each: each for each in AMBIGUOUS}
                for container in pod["spec"]["containers"]:
                    given = {each["name"]: each.get("value") for each in container["env"]}
                    expected = {} if container["name"] == "ray-job-submitter" else env
                    assert {name: given[name].replace("$$", "$") for name in expected} == expected
            if word == "y":
                validate(objects)
                assert not has_kubectl() or read_by_kubectl(manifest) == objects


@pytest.mark.skipif(not has_kubectl(), reason="kubectl is not installed")
def test_texts_of_several_lines_arrive_as_they_are() -> None:
    ends = ("", "\n", "\n\n", " \n", "\r\n", "\x85", "\u2028", "\t", "\ufeff", "\x00", "\x7f")
    texts = [f"{start}a{end}b{last}" for start in ("", " ", "\n", "\t", "# ", "- ") for end in ends for last in ends]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {}}
    config["data"] = {f"t{index}": text for index, text in enumerate([*texts, *AMBIGUOUS])}
    manifest = to_manifest([config])
    assert list(yaml.safe_load_all(manifest)) == read_by_kubectl(manifest) == [config]
    usual = to_manifest([{"data": {"job.yaml": "base: x\ndata:\n  files: []\n"}}])
    assert usual.count("\n") == 6, "a job is read in its lines"


def test_what_is_no_text_in_a_pod_is_refused() -> None:
    """The fields that may be numbers and truths are those of Kubernetes' own schema of a pod."""
    for pod, said in (
        ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu: True is no text: write it in quotes"),
        ({"nodeSelector": {"pool": 1e-4}}, r"nodeSelector.pool: 0.0001 is no text"),
        ({"tolerations": [{"key": "a", "value": None, "tolerationSeconds": 3}]}, "tolerations.value: None is no text"),
        ({"securityContext": "none"}, "securityContext: give a mapping"),
    ):
        with pytest.raises(ConfigError, match=said):
            shown({**CLUSTER, "pod_spec": pod})
    others = {*OWN_FIELDS, "ephemeralContainers"}
    assert fields_without_text("podspec-v1", others) > {"hostNetwork", "fsGroup", "weight"}
    assert fields_without_text("podspec-v1", others | NOT_TEXT) == set()


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
    assert {"port": 29600} in objects[1]["spec"]["ingress"][1]["ports"]
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


JOBSET = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/my-run"


def _start(cluster: dict[str, Any] = CLUSTER) -> int:
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    options = Options.given(launcher="kubernetes", cluster=Path("cluster.yaml"))
    return begin("capt.pretrain", "capt_tiny", JOB, options, debug=False, show=None)


@pytest.fixture(params=["kubectl", "client"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Way to a cluster."""
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
    others = [each["metadata"] for path, each in kept.items() if path != JOBSET]
    owners = [owner["uid"] for other in others for owner in other["ownerReferences"]]
    assert owners == [kept[JOBSET]["metadata"]["uid"]] * 2
    paths = [
        JOBSET,
        "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/my-run",
    ]
    assert sorted(kept)[1:] == paths
    assert sorted(kept)[0].startswith("/api/v1/namespaces/team/configmaps/my-run-")
    assert kept[paths[0]]["spec"] == shown(CLUSTER)[-1]["spec"]


def test_a_job_that_is_there(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one is left running; another one is refused, and so is one that has ended, which would not start."""
    path = JOBSET
    remedy = r"\((kubectl delete jobset,configmap,.*)\), then start again: what it has saved is continued"
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
            with pytest.raises(
                ConfigError, match=rf"has jobset/my-run already, .* ended \({end}\), .*{remedy}"
            ) as told:
                _start()
        if way == "kubectl":
            command = re.search(remedy, str(told.value))
            assert command
            subprocess.run(shlex.split(command[1]), check=True, capture_output=True)
            assert kept == {}
            assert _start() == 0


def test_what_is_deleted_leaves_nothing(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that we have applied takes its objects along; the guide has the line for a manifest applied by hand."""
    guide = (ROOT / "docs/guide/kubernetes.md").read_text()
    with api_server() as (server, kept):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(elsewhere / "config", server)))
        monkeypatch.setenv("HOME", str(elsewhere))
        assert _start() == 0
        ours, other = set(kept), "/api/v1/namespaces/team/configmaps/other"
        marks = {"app.kubernetes.io/instance": "my-run"}  # of other software
        kept[other] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other", "labels": marks}}
        urlopen(Request(f"{server}{JOBSET}", method="DELETE")).close()
        assert list(kept) == [other]
        if way == "client":
            return
        for kind, text in (("jobset", printed(CLUSTER)), ("rayjob", swept(CLUSTER, "sweep.dir=my-run"))):
            Path("manifest.yaml").write_text(text)
            kubectl = ["kubectl", "apply", "--server-side", "-f", "manifest.yaml"]
            subprocess.run(kubectl, check=True, capture_output=True)
            assert len(kept) == 1 + 3
            assert set(kept) == {other, *ours} or kind == "rayjob"
            (line,) = re.findall(rf"^kubectl delete {kind},.*$", guide, re.MULTILINE)
            subprocess.run(shlex.split(line.replace("NAME", "my-run")), check=True, capture_output=True)
            assert list(kept) == [other]


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
    files, policy, ray = yaml.safe_load_all(swept(FULL))
    validate([files, policy, ray])
    assert len(list(yaml.safe_load_all(swept({**FULL, "network_policy": False})))) == 2
    submitter = f"echo ray job submit -- {ray['spec']['entrypoint']} ; echo ray job logs"
    said = subprocess.run(["sh", "-c", submitter], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("ray job submit -- sh -c cd /work && exec python -m capt.launcher sweep /etc/capt/sweep")
    assert said[1:] == ["ray job logs"], "nothing of it runs in the submitter"
    assert ray["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1
    with pytest.raises(ConfigError, match="set a name of at most 47"):
        swept({**FULL, "name": "a" * 48})
    inside = elsewhere / "pod"
    inside.mkdir()
    for name, text in files["data"].items():
        assert re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name), "a key of a ConfigMap"
        (inside / name).write_text(text)
    cluster = load_kubernetes(Path("cluster.yaml"))
    assert yaml.safe_load(files["data"]["sweep.yaml"])["sweep"]["dir"] == f"{cluster.folder}/sweeps/My_Run"
    Path("mine.yaml").unlink()
    with pytest.raises(ConfigError, match=r"trial.workers 9: 2 pods of the cluster file hold 4 such ranks"):
        run_sweep(str(inside / "sweep.yaml"), ["sweep.trial.workers=9"], show=lambda text: None, cluster=cluster)


def test_nobody_else_has_a_sweep_run_code() -> None:
    """Ray wants a token wherever it listens, and the network policy lets in only those who need to come in."""
    _, policy, ray = yaml.safe_load_all(swept(CLUSTER))
    cluster = ray["spec"]["rayClusterSpec"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (sweep,) = [each for each in extras["sweep"] if each.startswith("ray")]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f">={cluster['rayVersion']}," in sweep, "KubeRay refuses authOptions without a version"
    submitter, head, worker = pods(ray)
    for pod in (submitter, head, worker):
        variables = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
        assert variables["RAY_AUTH_MODE"] == "token", "an operator that gives no token has no open cluster"
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        with pytest.raises(ConfigError, match=f"{name} is set for every rank"):
            swept({**CLUSTER, "env": {name: "disabled"}})
    own, operator = worker["metadata"]["labels"], {"app.kubernetes.io/component": "kuberay-operator"}
    job = pods(shown(CLUSTER)).__next__()["metadata"]["labels"]
    for pod in (head, worker):

        def reached(by: dict[str, str], port: int, *, elsewhere: bool = False, pod: Any = pod) -> bool:
            return admitted([policy], pod["metadata"]["labels"], by, port, elsewhere=elsewhere)

        assert all(reached(own, port) for port in (6379, 8265, 40000))
        assert reached(submitter["metadata"]["labels"], 8265)
        assert reached(operator, 8265, elsewhere=True)
        assert not reached(operator, 6379, elsewhere=True)
        assert not reached(own, 8265, elsewhere=True)
        assert not any(reached(by, 8265) for by in ({}, job, {**own, "app.kubernetes.io/name": "other"}))
    assert admitted([], own, {}, 8265, elsewhere=True), "without a policy all may come in"
