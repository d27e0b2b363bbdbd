"""Stand-in for a Kubernetes cluster in tests: schemas, an API server that keeps what it is given, a kubelet."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CRDS = {
    (crd["apiVersion"], crd["kind"]): crd
    for crd in map(json.loads, map(Path.read_text, sorted((ROOT / "tests/unit/launcher/crds").glob("*.json"))))
}
_CORE = {("v1", "ConfigMap"): "configmaps", ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies"}


def validate(objects: list[dict[str, Any]]) -> None:
    """Check objects against Kubernetes' own schemas, and those of the operators; every pod and job inside as well."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

    def core(version: str, kind: str, spec: Any) -> None:
        checker.validate({"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec}, "1.37", True)

    def inside(schema: Mapping[str, Any], value: Any) -> None:
        if schema.get("x-pod-spec"):
            core("v1", "Pod", value)
        elif schema.get("x-job-spec"):
            core("batch/v1", "Job", value)
        elif isinstance(value, dict):
            for key, each in value.items():
                inside(schema.get("properties", {}).get(key, {}), each)
        elif isinstance(value, list):
            for each in value:
                inside(schema.get("items", {}), each)

    for each in objects:
        crd = CRDS.get((each["apiVersion"], each["kind"]))
        if crd is None:
            checker.validate(each, "1.37", True)
            continue
        jsonschema.Draft202012Validator(crd["schema"]).validate(each)
        inside(crd["schema"], each)


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Find the templates of all pods in objects."""
    if isinstance(value, list):
        for each in value:
            yield from pods(each)
    elif isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield value
        for each in value.values():
            yield from pods(each)


_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
_SYSCTLS = frozenset(
    (
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
        *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
        *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
        *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
    )
)
_SELINUX = frozenset(("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"))


def unrestricted(pod: Mapping[str, Any]) -> list[str]:
    """Faults of a pod by the Pod Security Standard "restricted", "baseline" included, control by control.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/, as of Kubernetes 1.37.
    """
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    containers = [each for key in ("initContainers", "containers", "ephemeralContainers") for each in spec.get(key, ())]
    found = [f"{key} is true" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", ()):
        found += [f"volume type {kind}" for kind in volume.keys() - {"name"} - _VOLUMES]
    found += [f"sysctl {each['name']}" for each in whole.get("sysctls", ()) if each["name"] not in _SYSCTLS]
    notes = pod.get("metadata", {}).get("annotations", {})
    found += [
        f"AppArmor {value}"
        for key, value in notes.items()
        if key.startswith("container.apparmor.security.beta.kubernetes.io/")
        and value != "runtime/default"
        and not value.startswith("localhost/")
    ]
    for own in [whole, *(each.get("securityContext", {}) for each in containers)]:
        linux = own.get("seLinuxOptions", {})
        found += ["hostProcess"] * bool(own.get("windowsOptions", {}).get("hostProcess"))
        found += ["runAsUser 0"] * (own.get("runAsUser") == 0)
        found += ["SELinux"] * bool(linux.get("type", "") not in _SELINUX or linux.get("user") or linux.get("role"))
        found += ["AppArmor"] * (own.get("appArmorProfile", {}).get("type") == "Unconfined")
        found += ["seccomp Unconfined"] * (own.get("seccompProfile", {}).get("type") == "Unconfined")
    for each in containers:
        own, name = each.get("securityContext", {}), each["name"]
        caps = own.get("capabilities", {})
        found += [f"{name}: privileged"] * bool(own.get("privileged"))
        found += [f"{name}: hostPort"] * any(port.get("hostPort") for port in each.get("ports", ()))
        found += [f"{name}: procMount"] * (own.get("procMount", "Default") != "Default")
        found += [f"{name}: privileges escalate"] * (own.get("allowPrivilegeEscalation") is not False)
        found += [f"{name}: capabilities"] * (
            "ALL" not in caps.get("drop", ()) or not {*caps.get("add", ())} <= {"NET_BIND_SERVICE"}
        )
        found += [f"{name}: may be root"] * (own.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True)
        found += [f"{name}: no seccomp profile"] * (
            "type" not in own.get("seccompProfile", whole.get("seccompProfile", {}))
        )
        hooks = [each.get(key, {}) for key in ("livenessProbe", "readinessProbe", "startupProbe")]
        hooks += each.get("lifecycle", {}).values()
        found += [f"{name}: host of a probe"] * any(
            hook.get(way, {}).get("host") for hook in hooks for way in ("httpGet", "tcpSocket")
        )
    return found


def admitted(
    policies: list[dict[str, Any]], marks: Mapping[str, str], other: Mapping[str, str], port: int, *, elsewhere: bool
) -> bool:
    """Return whether policies let a pod of the labels ``other`` (``elsewhere``: of another namespace) reach a port."""

    def fits(selector: Mapping[str, Any], found: Mapping[str, str]) -> bool:
        return set(selector.get("matchLabels", {}).items()) <= set(found.items())

    own = [each["spec"] for each in policies if fits(each["spec"]["podSelector"], marks)]
    rules = [rule for spec in own for rule in spec["ingress"]]
    return not own or any(
        port in [each["port"] for each in rule.get("ports", [{"port": port}])]
        and any(
            fits(peer["podSelector"], other) and (not elsewhere or "namespaceSelector" in peer)
            for peer in rule.get("from", [{"podSelector": {}, "namespaceSelector": {}}])
        )
        for rule in rules
    )


def plain_texts(manifest: str) -> list[str]:
    """Scalars of a manifest without quotes that are neither numbers nor truths, and keys that could be such."""
    word, truth = r"[A-Za-z][A-Za-z0-9_./-]*", r"(?i:y|yes|true|on|n|no|false|off|null)"

    def inside(node: yaml.Node, plain: str) -> Iterator[str]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from inside(key, rf"(?!{truth}$){word}")
                yield from inside(value, plain)
        elif isinstance(node, yaml.SequenceNode):
            for each in node.value:
                yield from inside(each, plain)
        elif isinstance(node, yaml.ScalarNode) and node.style is None and not re.fullmatch(plain, node.value):
            yield node.value

    return [found for node in yaml.compose_all(manifest) for found in inside(node, r"0|-?[1-9][0-9]*|true|false")]


@contextmanager
def api_server(*, without: str = "") -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Serve a cluster that keeps objects by their path and knows all operators but ``without``; its address."""
    kept: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    known = {**_CORE, **{key: crd["plural"] for key, crd in CRDS.items() if crd["kind"] != without}}
    for (version, kind), plural in known.items():
        verbs = ["create", "delete", "get", "list", "patch"]
        groups.setdefault(version, []).append(
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        )

    class Handler(BaseHTTPRequestHandler):
        def answer(self, value: Any, code: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            version = path.removeprefix("/apis/").removeprefix("/api/")
            if path == "/version":
                self.answer({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
            elif path == "/api":
                self.answer({"kind": "APIVersions", "versions": ["v1"]})
            elif path == "/apis":
                named = sorted(version for version in groups if "/" in version)
                listed = [{"groupVersion": version, "version": version.partition("/")[2]} for version in named]
                self.answer(
                    {
                        "kind": "APIGroupList",
                        "apiVersion": "v1",
                        "groups": [
                            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
                            for one in listed
                        ],
                    }
                )
            elif version in groups:
                self.answer(
                    {
                        "kind": "APIResourceList",
                        "apiVersion": "v1",
                        "groupVersion": version,
                        "resources": groups[version],
                    }
                )
            elif path.startswith("/openapi/v3"):
                self.answer(_openapi(path.removeprefix("/openapi/v3").strip("/"), groups))
            elif path in kept:
                self.answer(kept[path])
            elif path.rpartition("/")[2] in known.values():
                self.answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": self.selected(path)})
            else:
                self.refuse()

        def selected(self, path: str) -> list[dict[str, Any]]:
            """The objects of a kind that have the labels, and the name, of the query."""
            asked = parse_qs(self.path.partition("?")[2])
            marks, fields = (
                dict(pair.split("=") for pair in asked.get(key, [""])[0].split(",") if pair)
                for key in ("labelSelector", "fieldSelector")
            )
            found = [each for place, each in kept.items() if place.rpartition("/")[0] == path]
            return [
                each
                for each in found
                if marks.items() <= each["metadata"]["labels"].items()
                and fields.get("metadata.name", each["metadata"]["name"]) == each["metadata"]["name"]
            ]

        def refuse(self) -> None:
            self.answer(
                {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}, 404
            )

        def take(self, path: str) -> None:
            given = yaml.safe_load(self.rfile.read(int(self.headers["Content-Length"])))
            path = path or f"{self.path.partition('?')[0]}/{given['metadata']['name']}"
            before = kept.get(path, given)
            if given["kind"] == "JobSet" and before["spec"] != given["spec"]:  # as the webhook of the operator says it
                said = 'admission webhook "vjobset.kb.io" denied the request: spec.replicatedJobs: field is immutable'
                self.answer(
                    {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403,
                     "message": said},
                    403,
                )  # fmt: skip
                return
            given["metadata"]["uid"] = before["metadata"].get("uid") or str(uuid4())
            kept[path] = given | {key: before[key] for key in ("status",) if key in before}
            self.answer(given, 201)

        def do_DELETE(self) -> None:
            """Remove an object, and then what it owns, as the garbage collector does."""
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            gone = kept.pop(self.path.partition("?")[0], None)
            if gone is None:
                return self.refuse()
            uid = gone["metadata"]["uid"]
            for path, each in list(kept.items()):
                if uid in [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]:
                    del kept[path]
            self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

        def do_POST(self) -> None:
            self.take("")

        def do_PATCH(self) -> None:
            assert self.headers["Content-Type"] == "application/apply-patch+yaml"
            assert "fieldValidation=Strict" in self.path, "a misspelt field would be dropped silently"
            self.take(self.path.partition("?")[0])

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kept
    finally:
        server.shutdown()
        server.server_close()


def _openapi(place: str, groups: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Answer to kubectl before it applies: which kinds the server validates itself."""
    roots = {version: f"{'apis' if '/' in version else 'api'}/{version}" for version in groups}
    if not place:
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots.values()}}
    (version,) = [version for version, root in roots.items() if root == place]
    group, _, last = version.rpartition("/")
    paths = {
        f"/{place}/namespaces/{{namespace}}/{each['name']}/{{name}}": {
            "patch": {
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": group, "version": last, "kind": each["kind"]},
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "OK"}},
            }
        }
        for each in groups[version]
    }
    return {"openapi": "3.0.0", "info": {"title": "a cluster", "version": "1"}, "paths": paths}


def kubeconfig(path: Path, server: str) -> Path:
    """Write the configuration of a client of an API server, with a namespace of its own."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    return path


@dataclass
class Kubelet:
    """Runs the pods of a JobSet as processes of this machine, and judges their ends as a Job does.

    The volume of the pods is ``work``. DNS is 127.0.0.1, and the port of the rendezvous is ``port``.
    """

    objects: list[dict[str, Any]]
    work: Path
    place: Path
    port: int
    pods: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Pod and exit code (negative: of a signal), in the order in which they ended."""
    failures: int = 0
    held: set[int] = field(default_factory=set)
    """Pods for which there is no node: they are not replaced before."""
    path: str = str(ROOT)
    stop: bool = False

    def __post_init__(self) -> None:
        (jobset,) = [each for each in self.objects if each["kind"] == "JobSet"]
        (replicated,) = jobset["spec"]["replicatedJobs"]
        self.job = replicated["template"]["spec"]
        self.pod = self.job["template"]["spec"]
        (self.container,) = self.pod["containers"]
        assert self.pod["restartPolicy"] == "Never"
        name = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}"
        self._dns = {name: "127.0.0.1"}
        files = self.place / "files"
        files.mkdir(parents=True)
        (config,) = [each for each in self.objects if each["kind"] == "ConfigMap"]
        for key, text in config["data"].items():
            (files / key).write_text(text)
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        assert volumes["files"]["configMap"]["name"] == config["metadata"]["name"]
        assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
        self._mounts = {
            mount["mountPath"]: files if mount["name"] == "files" else self.work
            for mount in self.container["volumeMounts"]
            if mount["mountPath"] != "/dev/shm"
        }

    def start(self, index: int) -> None:
        """Start the pod of an index."""
        own = self.place / f"pod-{index}"
        own.mkdir(exist_ok=True)
        places = {**self._mounts, "/tmp/": own}
        facts = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "metadata.labels['batch.kubernetes.io/controller-uid']": "uid-of-the-job",
        }
        env = {}
        for variable in self.container["env"]:
            value = variable.get("value") or facts[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            env[variable["name"]] = self._dns.get(value, value).replace("$$", "$")
        env["MASTER_PORT"] = str(self.port)
        argv = []
        for word in self.container["command"]:
            path = next((path for path in places if word.startswith(path)), "")
            word = word.replace("$$", "$")
            argv.append(str(places[path] / word.removeprefix(path).lstrip("/")) if path else word)
        assert argv[0] == "python"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        with (own / "log").open("ab") as log:
            self.pods[index] = subprocess.Popen(
                [sys.executable, *argv[1:]],
                cwd=self._mounts[self.container["workingDir"]],
                env={**inherited, "PYTHONPATH": self.path, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *, until: float) -> str:
        """Start all pods, and replace those that end as the Job says; ``Complete``, or why the Job failed."""
        deadline = time.monotonic() + until
        while time.monotonic() < deadline and not self.stop:
            time.sleep(0.05)
            for index in [index for index in range(self.job["completions"]) if index not in self.pods]:
                if index not in self.held:
                    self.start(index)
            for index, process in list(self.pods.items()):
                code = process.poll()
                if code is None:
                    continue
                self.ends.append((index, code))
                verdict = self._verdict(index, code)
                if verdict:
                    return verdict
                del self.pods[index]
        return "deadline of the test"

    def _verdict(self, index: int, code: int) -> str:
        """The end of the Job; empty where the pod is replaced."""
        if code == 0:
            (rule,) = self.job["successPolicy"]["rules"]
            return "Complete" if str(index) == rule["succeededIndexes"] else f"pod {index} ended for no reason"
        for rule in self.job["podFailurePolicy"]["rules"]:
            exits = rule.get("onExitCodes")
            if exits and exits["containerName"] == self.container["name"] and code in exits["values"]:
                return "PodFailurePolicy" if rule["action"] == "FailJob" else ""
        self.failures += 1
        return "BackoffLimitExceeded" if self.failures > self.job["backoffLimit"] else ""

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a pod as a lost node or the kernel does: supervisor and ranks alike; or ask it alone to end."""
        if number == signal.SIGKILL:
            os.killpg(self.pods[index].pid, number)
        else:
            self.pods[index].send_signal(number)

    def alive(self, index: int) -> bool:
        """Answer of a pod's liveness probe."""
        words = self.container["livenessProbe"]["exec"]["command"]
        own = [word.replace("/tmp/", f"{self.place / f'pod-{index}'}/") for word in words]
        return subprocess.run(own, check=False).returncode == 0

    def log(self, index: int) -> str:
        """Output of a pod."""
        return (self.place / f"pod-{index}" / "log").read_text(errors="replace")

    def close(self) -> None:
        """End all pods, and wait for them."""
        for process in self.pods.values():
            if process.poll() is None:
                process.terminate()
        for process in self.pods.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def fields_without_text(kind: str, leave: set[str]) -> set[str]:
    """The fields of a kind of Kubernetes' schemas that take numbers or truths, without ``leave`` and their own."""
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    folder = Path(checker.__file__).parent / "kubernetes-json-schema/v1.37.0-local"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    found, visited = set[str](), set[str]()

    def inside(schema: Mapping[str, Any], name: str) -> None:
        ref = schema.get("$ref", "").rpartition("/")[2]
        if ref and ref not in visited:
            visited.add(ref)
            inside(definitions[ref], name)
        types = [schema.get("type"), *(each.get("type") for each in schema.get("oneOf", ()))]
        if {one for each in types for one in (each if isinstance(each, list) else [each])} & {
            "integer",
            "number",
            "boolean",
        }:
            found.add(name)
        for key, value in schema.get("properties", {}).items():
            if key not in leave:
                inside(value, key)
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                inside(schema[key], name)

    inside(json.loads((folder / f"{kind}.json").read_text()), kind)
    return found


def read_by_kubectl(manifest: str) -> list[Any]:
    """The objects of a manifest as Kubernetes' own reader of YAML has them."""
    words = ["kubectl", "annotate", "--local", "-f", "-", "read=1", "-o", "json"]
    text = subprocess.run(words, input=manifest, capture_output=True, text=True, check=True).stdout.lstrip()
    found = []
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].lstrip()
        del value["metadata"]["annotations"]
        found.append(value)
    return found


def has_kubectl() -> bool:
    """Return whether the real client is installed."""
    return shutil.which("kubectl") is not None
