"""The settings of a Kubernetes cluster: a small YAML file (``capt/configs/cluster/kubernetes.yaml`` shows them all)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator

from capt.launcher.ssh import Slots
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.sensitive import is_secret
from capt.pretrain.config.base import Section
from capt.pretrain.config.load import explain, load_mapping

Name = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A label of RFC 1035, as services and the pods behind them are named."""
_Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A label of RFC 1123, as namespaces are named."""
_ObjectName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$", max_length=253)
]
"""A subdomain of RFC 1123, as claims and Secrets are named."""
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,200}$")]
_Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
_Path = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f:]{0,1000}$")]
_Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=4096)]
_Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]+$", max_length=1000)]
_Count = Annotated[int, Field(ge=0, le=100_000)]
OWN_FIELDS = {
    "containers": "image, env, volumes and the resources", "initContainers": "an image of your own",
    "volumes": "volumes", "restartPolicy": "restarts", "terminationGracePeriodSeconds": "save_seconds",
    "subdomain": "", "hostname": "",
}  # fmt: skip
"""Fields of a pod that other keys set, and those on which the manifest relies."""
_SET_BY_US = frozenset(
    (
        *("MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "CAPT_JOB"),
        *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    )
)
NOT_TEXT = frozenset(
    (
        *("activeDeadlineSeconds", "automountServiceAccountToken", "enableServiceLinks", "hostIPC", "hostNetwork"),
        *("hostPID", "hostUsers", "priority", "setHostnameAsFQDN", "shareProcessNamespace"),
        *("fsGroup", "runAsGroup", "runAsNonRoot", "runAsUser", "supplementalGroups", "hostProcess"),
        *("maxSkew", "minDomains", "tolerationSeconds", "weight", "overhead", "resources"),
    )
)
"""Fields of a pod's spec that hold numbers or truths; all others hold texts."""


class VolumeSection(Section):
    """A persistent volume claim, and where the pods see it."""

    model_config = ConfigDict(strict=True)

    claim: _ObjectName
    mount: _Path
    path: _Text = Field("", description="folder of the volume that is mounted; empty = the whole volume")
    read_only: bool = False


class KubernetesCluster(Section):
    """Pods, ranks and limits of a job on Kubernetes."""

    model_config = ConfigDict(strict=True)

    name: Name | None = Field(None, description="name of all objects; null = that of the run folder")
    namespace: _Label | None = Field(None, description="null = that of kubectl's context")
    image: _Word = Field(description="an image with CAPT in it (docker/), by tag or, better, by digest")
    python: _Word = Field("python", description="Python in the image")
    pods: Annotated[int, Field(ge=1, le=100_000)] = 1
    ranks_per_pod: Slots = 1
    gpus_per_pod: _Count = 0
    gpu_resource: _Word = Field("nvidia.com/gpu", description="name under which the nodes offer their GPUs")
    cpus_per_pod: _Count = Field(0, description="cores that a pod asks for; 0 = what the namespace gives")
    memory: _Quantity | None = Field(
        None, description="memory of a pod, its shared memory included; null = what the namespace gives"
    )
    shared_memory: _Quantity = Field("8Gi", description="size of /dev/shm, for NCCL and data workers")
    volumes: list[VolumeSection] = Field([], max_length=100)
    folder: _Path = Field("/work", description="working folder in the pods, on a volume: relative paths begin there")
    env: dict[_Variable, _Text] = Field({}, description="variables of the ranks (NCCL_SOCKET_IFNAME: eth0)")
    secrets: list[_ObjectName] = Field(
        [], max_length=100, description="Secrets of the namespace whose entries are variables of the ranks (HF_TOKEN)"
    )
    queue: _Label | None = Field(None, description="Kueue's LocalQueue: pods start together once there is room")
    save_seconds: int = Field(
        300, ge=1, le=86_400, description="time of a pod that has to go: at least the longest step and a save"
    )
    restarts: int = Field(3, ge=0, le=1000, description="pods that failed (not those that stopped) and are replaced")
    group: _Count | None = Field(1000, description="group that owns the volumes (fsGroup): the images' user")
    network_policy: bool = Field(
        True, description="pods of the job take connections of each other alone (a sweep's: of KubeRay's operator too)"
    )
    pod_spec: dict[str, Any] = Field(
        {}, description="further fields of the pods' spec (nodeSelector, tolerations, priorityClassName, hostNetwork)"
    )

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if name in _SET_BY_US:
                raise ValueError(f"{name} is set for every rank")
            if is_secret(name, value):
                raise ValueError(f"{name} looks like a secret: put it into a Secret, and that one's name into secrets")
        return env

    @field_validator("pod_spec")
    @classmethod
    def _own_fields_stay(cls, pod: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(OWN_FIELDS.keys() & pod.keys()):
            raise ValueError(
                f"{name}: {f'set {OWN_FIELDS[name]}' if OWN_FIELDS[name] else 'pods find each other by it'}"
            )
        if not isinstance(pod.get("securityContext", {}), dict):
            raise ValueError("securityContext: give a mapping")
        _require_texts(pod, "")
        return pod


def _require_texts(value: Any, place: str) -> None:
    """Raise ``ValueError`` for a number, truth or null where Kubernetes wants a text: ``nodeSelector: {gpu: yes}``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place}{key!r} is no text: write it in quotes")
            if key not in NOT_TEXT:
                _require_texts(inner, f"{place}{key}.")
    elif isinstance(value, list):
        for inner in value:
            _require_texts(inner, place)
    elif not isinstance(value, str):
        raise ValueError(f"{place.rstrip('.')}: {value!r} is no text: write it in quotes")


def load_kubernetes(path: Path) -> KubernetesCluster:
    """Read a cluster file, or the shipped one of a bare name such as ``kubernetes``.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value is not valid.
    """
    try:
        return KubernetesCluster.model_validate(load_mapping(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, KubernetesCluster)}") from None
