"""Kubernetes: the job as a JobSet whose pods supervise their ranks together (``capt.launcher.pod``)."""

from __future__ import annotations

import logging
from pathlib import Path

from capt.launcher.backends.hosts import divide
from capt.launcher.kubernetes.apply import apply, blocked_reason
from capt.launcher.kubernetes.manifests import ALIVE, JOB_FILES, job_manifest, object_name
from capt.launcher.kubernetes.settings import KubernetesCluster, load_kubernetes
from capt.launcher.plan import DEFAULT_PORT, Command, End, Launch, Plan
from capt.launcher.ssh import Host
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.run_folder import DONE
from capt.pretrain.registry import METRICS_PORT

log = logging.getLogger(__name__)

SPARES = True
"""Pods beyond ``--nodes`` are spares."""
ELSEWHERE = True
"""The pods see what the job reads and writes, so it need not be on this host."""


def plan(launch: Launch) -> Plan:
    """The manifest.

    Raises:
        ConfigError: an option of hosts or processes is given, the cluster file is wrong or missing, or a run is to be
            resumed that a cluster resumes by itself.
    """
    options = launch.options
    refused = ("hostfile", "nproc", "master_addr")
    options.refuse("kubernetes", *refused, because="pods and ranks are set in the --cluster file")
    if not launch.files:
        raise ConfigError(
            "--launcher kubernetes resumes a run by itself: apply the same job again with capt pretrain; "
            "--launcher local resumes it here"
        )
    cluster = load_kubernetes(options.cluster or Path("kubernetes"))
    if 0 < cluster.gpus_per_pod < cluster.ranks_per_pod:
        raise ConfigError(
            f"ranks_per_pod: {cluster.ranks_per_pod} ranks of a pod need a GPU each, and gpus_per_pod is "
            f"{cluster.gpus_per_pod}"
        )
    listed = tuple(Host(f"pod-{index}", cluster.ranks_per_pod) for index in range(cluster.pods))
    hosts, spares = divide(launch, listed, "the cluster file", "asks for only {} pods")
    port = options.master_port or DEFAULT_PORT
    words = pod_words(launch, cluster, len(hosts))
    # The one file of a new launch is the merged job.
    (text,) = launch.files.values()
    manifest = job_manifest(
        cluster,
        object_name(cluster, launch.run_dir.name),
        text,
        words,
        port=port,
        metrics_port=_metrics_port(launch),
    )
    command = Command(("kubectl", "apply", "--server-side", "-f", "-"))
    return Plan(
        "kubernetes",
        hosts,
        (command,),
        master_port=port,
        spares=spares,
        manifest=manifest,
        blocked_reason=blocked_reason(),
    )


def start(launch: Launch, plan: Plan) -> End:
    """Apply the manifest; returns as soon as the cluster has it. Raises ``ConfigError`` where it refuses."""
    for line in apply(plan.manifest):
        log.info("%s", line)
    return End(DONE)


def pod_words(launch: Launch, cluster: KubernetesCluster, nodes: int) -> list[str]:
    """Return what each pod runs after Python: its supervisor, and the job, begun or resumed as it finds it."""
    return [
        *("-m", "capt.launcher.pod", "--pods", str(cluster.pods), "--nodes", str(nodes)),
        *("--ranks", str(cluster.ranks_per_pod), "--alive", ALIVE),
        *(launch.module, str(JOB_FILES / "job.yaml"), *launch.arguments[1:], "--resume=auto"),
    ]


def _metrics_port(launch: Launch) -> int | None:
    """The port of a Prometheus endpoint that listens to other hosts."""
    asked = launch.job.run.callbacks.get("prometheus")
    if asked is None or asked.get("host") != "0.0.0.0":
        return None
    port = asked.get("port", METRICS_PORT)
    return port if isinstance(port, int) and port else None
