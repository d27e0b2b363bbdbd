"""Gives manifests to a cluster: through ``kubectl`` where it is installed, else through the official Python client."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from typing import Any

import yaml

from capt.launcher import environment
from capt.pretrain.base.errors import ConfigError, how_to_install

_MANAGER = "capt"


def blocked_reason() -> str:
    """Why nothing can be applied from here; empty when it can."""
    if shutil.which("kubectl") or find_spec("kubernetes"):
        return ""
    return (
        "there is neither kubectl nor Kubernetes' Python client here; install one "
        f"({how_to_install('kubernetes')}), or apply elsewhere what --dry-run prints"
    )


def apply(manifest: str) -> list[str]:
    """Create or change the objects of a manifest; returns a line for each.

    Raises:
        ConfigError: there is no way to a cluster, or it refuses an object.
    """
    if reason := blocked_reason():
        raise ConfigError(reason)
    if kubectl := shutil.which("kubectl"):
        done = subprocess.run(
            [kubectl, "apply", "--server-side", "-f", "-"], input=manifest, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ConfigError(f"kubectl apply: {' '.join(done.stderr.split()) or f'ended with {done.returncode}'}")
        return done.stdout.splitlines()
    return _through_client(list(yaml.safe_load_all(manifest)))


def _through_client(objects: list[dict[str, Any]]) -> list[str]:
    """Server-side apply, as ``kubectl apply --server-side`` does."""
    from kubernetes import client, config, dynamic
    from kubernetes.client.exceptions import ApiException
    from kubernetes.dynamic.exceptions import ResourceNotFoundError
    from urllib3.exceptions import HTTPError

    lines = []
    try:
        named = environment.inherited().get("KUBECONFIG")  # the client itself looks as it is imported
        config.load_config(**({"config_file": named} if named else {}))
        cluster = dynamic.DynamicClient(client.ApiClient())
        for each in objects:
            kind, metadata = each["kind"], each["metadata"]
            try:
                resource = cluster.resources.get(api_version=each["apiVersion"], kind=kind)
            except ResourceNotFoundError:
                raise ConfigError(
                    f"the cluster knows no {kind} of {each['apiVersion']}: its operator is not installed"
                ) from None
            resource.server_side_apply(
                body=each,
                name=metadata["name"],
                namespace=metadata.get("namespace") or _namespace(config, named),
                field_manager=_MANAGER,
            )
            lines.append(f"{kind.lower()}/{metadata['name']} applied")
    except config.ConfigException as error:
        raise ConfigError(f"no Kubernetes cluster is configured here: {' '.join(str(error).split())}") from None
    except ApiException as error:
        raise ConfigError(f"the cluster refuses {kind}/{metadata['name']}: {error.status} {error.reason}") from None
    except HTTPError as error:
        raise ConfigError(f"the cluster does not answer: {' '.join(str(error).split())[:300]}") from None
    return lines


def _namespace(config: Any, named: str | None) -> str:
    """The namespace of the current context."""
    try:
        return str(config.list_kube_config_contexts(named)[1]["context"].get("namespace") or "default")
    except config.ConfigException:  # in a pod
        return "default"
