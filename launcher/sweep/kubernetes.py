"""A sweep on Kubernetes: a RayJob, whose Ray cluster KubeRay makes for the sweep and takes down after it."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePosixPath

from capt.launcher.kubernetes.manifests import JOB_FILES, object_name, sweep_manifest
from capt.launcher.kubernetes.settings import KubernetesCluster
from capt.launcher.sweep.config import Sweep
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_mapping
from capt.pretrain.config.reader import to_yaml

_SWEEP = "sweep.yaml"


def manifest(sweep: Sweep, cluster: KubernetesCluster) -> str:
    """Render the RayJob of a sweep; jobs that are in files of this machine go with it.

    Raises:
        ConfigError: a trial has more ranks, cores or GPUs than the pods have, or the cluster file a network policy.
    """
    if cluster.network_policy:
        raise ConfigError(
            "the cluster file of a sweep needs network_policy: false: KubeRay's operator and submitter call its pods, "
            "so that none is rendered; give the namespace a policy of its own"
        )
    ranks_per_pod = _ranks_per_pod(sweep, cluster)
    if sweep.trial.workers > ranks_per_pod * cluster.pods:
        raise ConfigError(
            f"trial.workers {sweep.trial.workers}: {cluster.pods} pods of the cluster file hold "
            f"{ranks_per_pod * cluster.pods} such ranks; set pods, cpus_per_pod or gpus_per_pod"
        )
    files, studies = {}, dict(sweep.studies)
    for name, study in sweep.studies.items():
        if Path(study.base).is_file():
            base = f"base-{name}.yaml"
            files[base] = to_yaml(load_mapping(study.base))
            studies[name] = study.model_copy(update={"base": base})
    folder = PurePosixPath(cluster.folder)
    home, where = Path.cwd(), sweep.sweep.dir
    place = folder / (where.relative_to(home) if where.is_relative_to(home) else where)
    section = sweep.sweep.model_copy(update={"dir": Path(place)})
    files[_SWEEP] = sweep.model_copy(update={"studies": studies, "sweep": section}).to_yaml()
    words = shlex.join(
        [
            *(cluster.python, "-m", "capt.launcher", "sweep", str(JOB_FILES / _SWEEP)),
            *("--address", "auto", "--resume", "auto"),
        ]
    )
    # KubeRay puts the entrypoint unquoted into a line of its submitter's shell: no operator may be a word of it.
    command = shlex.join(["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {words}"])
    return sweep_manifest(cluster, object_name(cluster, place.name), files, command)


def _ranks_per_pod(sweep: Sweep, cluster: KubernetesCluster) -> int:
    """How many ranks of a trial a pod holds, as far as the cluster file tells."""
    trial = sweep.trial
    gpus = min(1, cluster.gpus_per_pod) if trial.gpus == "auto" else trial.gpus
    if not cluster.cpus_per_pod:
        raise ConfigError("the cluster file of a sweep needs cpus_per_pod: Ray shares the cores of a pod among trials")
    by_cores = int(cluster.cpus_per_pod // trial.cpus)
    return min(by_cores, int(cluster.gpus_per_pod // gpus)) if gpus else by_cores
