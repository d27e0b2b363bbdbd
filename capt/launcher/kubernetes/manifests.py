"""The manifests of a job (JobSet) and of a sweep (RayJob), as plain values and as YAML.

A job is one Indexed Job of a JobSet, whose headless service names its pods. Every pod runs ``capt.launcher.pod``, which
takes its number from the completion index and finds the first pod under ``MASTER_ADDR``. Exit codes become decisions of
the Job (``podFailurePolicy``): 2 fails it, 75 and evictions replace the pod without being counted, any other is counted
in ``backoffLimit``. The first pod judges the whole job, so its end is the job's (``successPolicy``).

Every pod satisfies the Pod Security Standard "restricted", as long as ``pod_spec`` does. Every object has `labels`, by
which all objects of a job are found and removed together.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from capt.launcher.kubernetes.settings import KubernetesCluster
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.run_folder import BAD_INPUT, STOPPED

JOB_FILES = PurePosixPath("/etc/capt")
"""Folder in which the pods see the merged job, or the sweep."""
ALIVE = "/tmp/capt-alive"
"""The file that a pod's supervisor touches, and the kubelet's probe looks at."""
CONTAINER, _NODES = "node", "node"
_ALIVE_MINUTES = 2
_LONGEST_NAME, _LONGEST_FILES = 63, 1 << 20
_LONGEST_SWEEP = 47  # KubeRay adds six characters for the cluster and ten for its services
_RAY = "2.60.0"
"""The lowest release of Ray that the extra ``sweep`` takes; KubeRay gives a token to none without a version."""
_DASHBOARD = 8265  # where Ray has it by default
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
"""A label that KubeRay's operator has however it was installed."""
_UID_OF_JOB = "metadata.labels['batch.kubernetes.io/controller-uid']"


def job_manifest(
    cluster: KubernetesCluster,
    name: str,
    text: str,
    words: Sequence[str],
    *,
    port: int,
    metrics_port: int | None,
) -> str:
    """Render all objects of a job.

    Args:
        cluster: the settings.
        name: of the objects.
        text: the merged job, which the pods read as ``job.yaml`` in `JOB_FILES`.
        words: what each pod runs after Python.
        port: the rendezvous of the ranks; the pods meet at the next one.
        metrics_port: of a Prometheus endpoint that others may ask.

    Raises:
        ConfigError: the name is too long for its pods, or the job too large for a ConfigMap.
    """
    # A pod is called NAME-node-0-NUMBER, and a host name has 63 characters at most.
    longest = _LONGEST_NAME - len(f"-{_NODES}-0-{cluster.pods}")
    files = _files(cluster, name, labels(name, "job"), {"job.yaml": text}, longest)
    ports = [{"name": "metrics", "containerPort": metrics_port}] if metrics_port else []
    container = {
        **_container(cluster, CONTAINER),
        "command": [_literal(word) for word in (cluster.python, *words)],
        "env": [
            {"name": "MASTER_ADDR", "value": first_pod(name)},
            {"name": "MASTER_PORT", "value": str(port)},
            {
                "name": "JOB_COMPLETION_INDEX",
                "valueFrom": _field("metadata.annotations['batch.kubernetes.io/job-completion-index']"),
            },
            {"name": "CAPT_JOB", "valueFrom": _field(_UID_OF_JOB)},
            *_env(cluster),
        ],
        # A supervisor that hangs cannot say so: the kubelet ends its pod when it no longer touches this file.
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test -n "$(find {ALIVE} -mmin -{_ALIVE_MINUTES})"']},
            "initialDelaySeconds": 60,
            "periodSeconds": 30,
            "failureThreshold": 3,
        },
        **({"ports": ports} if ports else {}),
    }
    marks = labels(name, "job")
    spec = {
        # Pods find each other by name before they are ready.
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        # The Job counts failures (backoffLimit); the set itself starts nothing again.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": _NODES, "replicas": 1, "template": _indexed_job(cluster, _pod(cluster, marks, container, files))}
        ],
    }
    others = [{"ports": [{"port": metrics_port}]}] if metrics_port else []
    jobset = _object(cluster, "jobset.x-k8s.io/v1alpha2", "JobSet", name, marks, spec, queued=True)
    return to_manifest([files, *_own_network(cluster, name, marks, others), jobset])


def sweep_manifest(cluster: KubernetesCluster, name: str, files: Mapping[str, str], command: str) -> str:
    """Render a RayJob: a Ray cluster of ``pods`` pods that lives as long as the sweep, and the command on its head.

    ``files`` are the sweep and its jobs, in `JOB_FILES`. A RayJob knows no exit codes: one that ends otherwise than
    with 0 is started again, up to ``restarts`` times. All who reach Ray can have it run code, so it wants a token,
    which KubeRay makes for each cluster and gives to its pods, and the network policy lets in only the pods of the
    sweep and, at the dashboard, KubeRay's operator.

    Raises:
        ConfigError: the name is too long for its pods, or the files too large for a ConfigMap.
    """
    marks = labels(name, "sweep")
    described = _files(cluster, name, marks, files, _LONGEST_SWEEP)
    # An operator that does not know authOptions gives no token: Ray then refuses to start, instead of being open.
    token = [{"name": "RAY_AUTH_MODE", "value": "token"}]
    head, worker = (
        {**_container(cluster, each), "env": [*token, *_env(cluster)]} for each in ("ray-head", "ray-worker")
    )
    submitter = {
        "name": "ray-job-submitter",
        "image": cluster.image,
        "resources": {"requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": dict(_CONFINED),
        "env": token,
    }
    spec: dict[str, Any] = {
        "entrypoint": _literal(command),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": cluster.restarts,
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": _pod(cluster, marks, submitter),
        "rayClusterSpec": {
            "rayVersion": _RAY,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                # The submitter and the operator are other pods.
                "rayStartParams": {"dashboard-host": "0.0.0.0"},
                "template": _pod(cluster, marks, head, described),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "nodes",
                    # The head is one of the pods.
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), cluster.pods - 1),
                    "rayStartParams": {},
                    "template": _pod(cluster, marks, worker, described),
                }
            ]
            if cluster.pods > 1
            else [],
        },
    }
    operator = {
        "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}],
        "ports": [{"port": _DASHBOARD}],
    }
    policy = _own_network(cluster, f"{name}-ray", marks, [operator])
    return to_manifest([described, *policy, _object(cluster, "ray.io/v1", "RayJob", name, marks, spec, queued=True)])


def labels(name: str, part: str) -> dict[str, str]:
    """Return the labels by which the objects and pods of a job (``part`` "job") or a sweep ("sweep") are found.

    Each is needed: a job and a sweep may have the same name, and so may an instance of other software.
    """
    return {
        "app.kubernetes.io/name": "capt",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": part,
    }


def first_pod(name: str) -> str:
    """The name under which the headless service has the pod of index 0."""
    return f"{name}-{_NODES}-0-0.{name}"


def object_name(cluster: KubernetesCluster, folder: str) -> str:
    """The name of a cluster file, else one made of the name of the run folder."""
    if cluster.name:
        return cluster.name
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    return name if name[:1].isalpha() else f"capt-{name}".strip("-")


def to_manifest(objects: Sequence[Mapping[str, Any]]) -> str:
    """Objects as one text for ``kubectl apply --server-side -f -``."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=math.inf
    )


class _Dumper(yaml.SafeDumper):
    """Writes every text so that all readers of YAML 1.1 and 1.2 read that text.

    PyYAML leaves ``1e-4``, ``0o14`` and ``y`` without quotes, in which Kubernetes' reader sees numbers and truths. So
    values are quoted, or blocks where they have several plain lines, and keys are where they could be anything else.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if _PLAIN_KEY.fullmatch(key.value) and key.value.lower() not in _TRUTHS:
                key.style = None
        return node


_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_TRUTHS = frozenset(("y", "yes", "true", "on", "n", "no", "false", "off", "null"))


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    lines = value.split("\n")
    block = len(lines) > 1 and all(map(str.isprintable, lines)) and not value[:1].isspace()
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if block else '"')


_Dumper.add_representer(str, _text)


def _object(
    cluster: KubernetesCluster,
    version: str,
    kind: str,
    name: str,
    marks: Mapping[str, str],
    spec: Mapping[str, Any],
    *,
    queued: bool = False,
) -> dict[str, Any]:
    metadata = _metadata(cluster, name, marks)
    if queued and cluster.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _metadata(cluster: KubernetesCluster, name: str, marks: Mapping[str, str]) -> dict[str, Any]:
    place = {"namespace": cluster.namespace} if cluster.namespace else {}
    return {"name": name, **place, "labels": dict(marks)}


def _files(
    cluster: KubernetesCluster, name: str, marks: Mapping[str, str], files: Mapping[str, str], longest: int
) -> dict[str, Any]:
    """A ConfigMap that is named by its content: other files never change under a job that runs."""
    if len(name) > longest:
        raise ConfigError(f"name {name!r}: the names of its pods would be too long; set a name of at most {longest}")
    if sum(len(text.encode()) for text in files.values()) > _LONGEST_FILES:
        raise ConfigError("the job is larger than a ConfigMap may be (1 MiB): put lists of files into a pattern")
    digest = hashlib.sha256("\0".join(f"{key}\0{files[key]}" for key in sorted(files)).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster, f"{name}-{digest}", marks),
        "immutable": True,
        "data": dict(files),
    }


def _own_network(
    cluster: KubernetesCluster, name: str, marks: Mapping[str, str], others: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A policy that lets only pods of the job connect to its pods, and ``others``.

    The rendezvous, gloo, NCCL and what Ray's nodes tell each other go over the network in the clear.
    """
    if not cluster.network_policy:
        return []
    own = {"matchLabels": dict(marks)}
    ingress = [{"from": [{"podSelector": own}]}, *others]
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress}
    return [_object(cluster, "networking.k8s.io/v1", "NetworkPolicy", name, marks, spec)]


def _indexed_job(cluster: KubernetesCluster, pod: Mapping[str, Any]) -> dict[str, Any]:
    def on_exit(action: str, code: int) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec = {
        "completionMode": "Indexed",
        "completions": cluster.pods,
        "parallelism": cluster.pods,
        "backoffLimit": cluster.restarts,
        "podReplacementPolicy": "Failed",  # never two pods of one number
        "podFailurePolicy": {"rules": [on_exit("FailJob", BAD_INPUT), on_exit("Ignore", STOPPED), evicted]},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": pod,
    }
    return {"spec": spec}


def _pod(
    cluster: KubernetesCluster,
    marks: Mapping[str, str],
    container: Mapping[str, Any],
    files: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A pod of one container; with ``files`` it has those, and the volumes of the cluster file."""
    # What the cluster file says of its pods comes last and wins.
    given = dict(cluster.pod_spec)
    security = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        # Else each start of a pod would change the owner of every file of a volume.
        **({} if cluster.group is None else {"fsGroup": cluster.group, "fsGroupChangePolicy": "OnRootMismatch"}),
        **given.pop("securityContext", {}),
    }
    own: dict[str, Any] = {
        "automountServiceAccountToken": False,  # the pods ask nothing of the cluster
        "enableServiceLinks": False,  # a service's name would become variables of the ranks
        "securityContext": security,
        "containers": [container],
    }
    if container["name"] == CONTAINER:
        own |= {"restartPolicy": "Never", "shareProcessNamespace": True}  # process 1 then collects orphans
    if files is None:  # a pod that only submits
        own |= {"restartPolicy": "Never"}
    else:
        claims = [
            {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for index, volume in enumerate(cluster.volumes)
        ]
        own |= {
            "terminationGracePeriodSeconds": cluster.save_seconds,
            "volumes": [
                {"name": "files", "configMap": {"name": files["metadata"]["name"]}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shared_memory}},
                *claims,
            ],
        }
    return {"metadata": {"labels": dict(marks)}, "spec": {**own, **given}}


_CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _container(cluster: KubernetesCluster, name: str) -> dict[str, Any]:
    given = {cluster.gpu_resource: cluster.gpus_per_pod} if cluster.gpus_per_pod else {}
    limits = {**given, **({"memory": cluster.memory} if cluster.memory else {})}
    asked = {**limits, **({"cpu": cluster.cpus_per_pod} if cluster.cpus_per_pod else {})}
    resources = {key: value for key, value in (("requests", asked), ("limits", limits)) if value}
    mounts = [
        {
            "name": f"volume-{index}",
            "mountPath": volume.mount,
            **({"subPath": volume.path} if volume.path else {}),
            **({"readOnly": True} if volume.read_only else {}),
        }
        for index, volume in enumerate(cluster.volumes)
    ]
    secrets = [{"secretRef": {"name": secret}} for secret in cluster.secrets]
    return {
        "name": name,
        "image": cluster.image,
        "workingDir": cluster.folder,
        "resources": resources,
        "securityContext": dict(_CONFINED),
        **({"envFrom": secrets} if secrets else {}),
        "volumeMounts": [
            {"name": "files", "mountPath": str(JOB_FILES), "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *mounts,
        ],
    }


def _env(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    return [{"name": name, "value": _literal(value)} for name, value in cluster.env.items()]


def _literal(text: str) -> str:
    """A text of a container as the kubelet has to be given it, which replaces ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def _field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}
