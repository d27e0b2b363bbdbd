"""The manifests of a job (JobSet or TrainJob) and of a sweep (RayJob), as plain values and as YAML.

A job is one Indexed Job of a JobSet, whose headless service names its pods. Every pod runs ``capt.launcher.pod``, which
takes its number from the completion index and finds the first pod under ``MASTER_ADDR``. Exit codes become decisions of
the Job (``podFailurePolicy``): 2 fails it, 75 and evictions replace the pod without being counted, any other is counted
in ``backoffLimit``. The first pod judges the whole job, so its end is the job's (``successPolicy``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from capt.launcher.kubernetes.settings import KubernetesCluster
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.run_folder import BAD_INPUT, STOPPED

JOB_FILES = PurePosixPath("/etc/capt")
"""Where the pods see the merged job, or the sweep."""
ALIVE = "/tmp/capt-alive"
"""The file that a pod's supervisor touches, and the kubelet's probe looks at."""
CONTAINER, _NODES = "node", "node"  # as Kubeflow's trainer wants them named
_ALIVE_MINUTES = 2
_LONGEST_NAME, _LONGEST_FILES = 63, 1 << 20
_LONGEST_SWEEP = 47  # KubeRay adds six characters for the cluster and ten for its services
_INSTANCE = "app.kubernetes.io/instance"
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
    files = _files(cluster, name, {"job.yaml": text}, longest=_LONGEST_NAME - len(f"-{_NODES}-0-{cluster.pods}"))
    ports = [{"name": "metrics", "containerPort": metrics_port}] if metrics_port else []
    container = {
        **_container(cluster, CONTAINER),
        "command": [cluster.python, *words],
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
    spec = {
        # Pods find each other by name before they are ready.
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        # The Job counts failures (backoffLimit); the set itself starts nothing again.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": _NODES, "replicas": 1, "template": _indexed_job(cluster, _pod(cluster, name, files, container))}
        ],
    }
    objects = [files, *_own_network(cluster, name, metrics_port)]
    if cluster.form == "jobset":
        objects.append(_object(cluster, "jobset.x-k8s.io/v1alpha2", "JobSet", name, spec, queued=True))
    else:
        runtime = {"mlPolicy": {"numNodes": cluster.pods}, "template": {"spec": spec}}
        train = {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": cluster.pods},
        }
        version = "trainer.kubeflow.org/v1alpha1"
        objects.append(_object(cluster, version, "TrainingRuntime", name, runtime))
        objects.append(_object(cluster, version, "TrainJob", name, train, queued=True))
    return to_manifest(objects)


def sweep_manifest(cluster: KubernetesCluster, name: str, files: Mapping[str, str], command: str) -> str:
    """Render a RayJob: a Ray cluster of ``pods`` pods that lives as long as the sweep, and the command on its head.

    ``files`` are the sweep and its jobs, in `JOB_FILES`. A RayJob knows no exit codes: one that ends otherwise than
    with 0 is started again, up to ``restarts`` times.

    Raises:
        ConfigError: the name is too long for its pods, or the files too large for a ConfigMap.
    """
    described = _files(cluster, name, files, longest=_LONGEST_SWEEP)
    head, worker = ({**_container(cluster, each), "env": _env(cluster)} for each in ("ray-head", "ray-worker"))
    spec: dict[str, Any] = {
        "entrypoint": command,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": cluster.restarts,
        "rayClusterSpec": {
            "headGroupSpec": {
                # The submitter is another pod.
                "rayStartParams": {"dashboard-host": "0.0.0.0"},
                "template": _pod(cluster, name, described, head),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "nodes",
                    # The head is one of the pods.
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), cluster.pods - 1),
                    "rayStartParams": {},
                    "template": _pod(cluster, name, described, worker),
                }
            ]
            if cluster.pods > 1
            else [],
        },
    }
    return to_manifest([described, _object(cluster, "ray.io/v1", "RayJob", name, spec, queued=True)])


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
        objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=10_000
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _object(
    cluster: KubernetesCluster, version: str, kind: str, name: str, spec: Mapping[str, Any], *, queued: bool = False
) -> dict[str, Any]:
    metadata = _metadata(cluster, name)
    if queued and cluster.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _metadata(cluster: KubernetesCluster, name: str, of: str = "") -> dict[str, Any]:
    place = {"namespace": cluster.namespace} if cluster.namespace else {}
    return {"name": name, **place, "labels": {"app.kubernetes.io/name": "capt", _INSTANCE: of or name}}


def _files(cluster: KubernetesCluster, name: str, files: Mapping[str, str], *, longest: int) -> dict[str, Any]:
    """A ConfigMap that is named by its content: other files never change under a job that runs."""
    if len(name) > longest:
        raise ConfigError(f"name {name!r}: the names of its pods would be too long; set a name of at most {longest}")
    if sum(len(text.encode()) for text in files.values()) > _LONGEST_FILES:
        raise ConfigError("the job is larger than a ConfigMap may be (1 MiB): put lists of files into a pattern")
    digest = hashlib.sha256("\0".join(f"{key}\0{files[key]}" for key in sorted(files)).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster, f"{name}-{digest}", name),
        "immutable": True,
        "data": dict(files),
    }


def _own_network(cluster: KubernetesCluster, name: str, metrics_port: int | None) -> list[dict[str, Any]]:
    """A policy that lets only pods of the job connect to its pods: rendezvous, gloo and NCCL do not authenticate."""
    if not cluster.network_policy:
        return []
    own = {"matchLabels": {_INSTANCE: name}}
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": own}]}]
    if metrics_port:
        ingress.append({"ports": [{"port": metrics_port}]})
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress}
    return [_object(cluster, "networking.k8s.io/v1", "NetworkPolicy", name, spec)]


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
    return {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": spec}


def _pod(
    cluster: KubernetesCluster, name: str, files: Mapping[str, Any], container: Mapping[str, Any]
) -> dict[str, Any]:
    claims = [
        {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}}
        for index, volume in enumerate(cluster.volumes)
    ]
    own = {
        "terminationGracePeriodSeconds": cluster.save_seconds,
        "automountServiceAccountToken": False,  # the pods ask nothing of the cluster
        "enableServiceLinks": False,  # a service's name would become variables of the ranks
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            # Else each start of a pod would change the owner of every file of a volume.
            **({} if cluster.group is None else {"fsGroup": cluster.group, "fsGroupChangePolicy": "OnRootMismatch"}),
        },
        "containers": [container],
        "volumes": [
            {"name": "files", "configMap": {"name": files["metadata"]["name"]}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shared_memory}},
            *claims,
        ],
    }
    if container["name"] == CONTAINER:
        own = {"restartPolicy": "Never", "shareProcessNamespace": True, **own}  # process 1 then collects orphans
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "capt", _INSTANCE: name}},
        # What the cluster file says of its pods comes last and wins.
        "spec": {**own, **cluster.pod_spec},
    }


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
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **({"envFrom": secrets} if secrets else {}),
        "volumeMounts": [
            {"name": "files", "mountPath": str(JOB_FILES), "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *mounts,
        ],
    }


def _env(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in cluster.env.items()]


def _field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}
