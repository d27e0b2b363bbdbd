"""Gives manifests to a cluster: through ``kubectl`` where it is installed, else through the official Python client."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import yaml

from capt.launcher import environment
from capt.pretrain.base.errors import ConfigError, how_to_install

_MANAGER = "capt"
_JOBS = ("JobSet", "TrainJob", "RayJob")
_ENDS = ("Completed", "Complete", "Failed")


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
        ConfigError: there is no way to a cluster, it refuses an object, or it has a job of the name that has ended.
    """
    if reason := blocked_reason():
        raise ConfigError(reason)
    objects = list(yaml.safe_load_all(manifest))
    jobs = [each for each in objects if each["kind"] in _JOBS]
    if kubectl := shutil.which("kubectl"):
        return _through_kubectl(kubectl, manifest, jobs)
    return _through_client(objects, jobs)


def _through_kubectl(kubectl: str, manifest: str, jobs: Sequence[dict[str, Any]]) -> list[str]:
    there = subprocess.run(
        [kubectl, "get", "-f", "-", "--ignore-not-found", "-o", "json"],
        input=yaml.safe_dump_all(jobs), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if there.returncode == 0 and there.stdout.strip():  # who may not read jobs may still apply them
        found = json.loads(there.stdout)
        for each in found.get("items", [found]):
            _require_running(each)
    done = subprocess.run(
        [kubectl, "apply", "--server-side", "-f", "-"], input=manifest, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise ConfigError(f"kubectl apply: {said or f'ended with {done.returncode}'}{_remedy(said, jobs)}")
    return done.stdout.splitlines()


def _require_running(job: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a job that the cluster has is one that ended: applying it would start nothing."""
    status = job.get("status") or {}
    ends = [each["type"] for each in status.get("conditions") or () if each.get("status") == "True"]
    ends.append(status.get("jobDeploymentStatus", ""))  # of a RayJob
    if end := next((end for end in ends if end in _ENDS), None):
        raise ConfigError(
            f"the cluster has {_named(job)} already, which has ended ({end}), and applying it again starts nothing"
            f"{_delete([job])}"
        )


def _named(job: dict[str, Any]) -> str:
    return f"{job['kind'].lower()}/{job['metadata']['name']}"


def _remedy(said: str, jobs: Sequence[dict[str, Any]]) -> str:
    """What is done about a refusal, where it is that of a change of a job that is there."""
    return _delete(jobs) if "immutable" in said else ""


def _delete(jobs: Sequence[dict[str, Any]]) -> str:
    place = jobs[0]["metadata"].get("namespace")
    command = " ".join(["kubectl", "delete", *map(_named, jobs), *(["-n", place] if place else [])])
    return f"; stop and remove it ({command}), then start again: what it has saved is continued"


def _through_client(objects: Sequence[dict[str, Any]], jobs: Sequence[dict[str, Any]]) -> list[str]:
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
            place = {"name": metadata["name"], "namespace": metadata.get("namespace") or _namespace(config, named)}
            if each in jobs:
                with suppress(dynamic.exceptions.NotFoundError, dynamic.exceptions.ForbiddenError):
                    _require_running(resource.get(**place).to_dict())
            strict = [("fieldValidation", "Strict")]  # as kubectl: a field that is misspelt is not dropped silently
            resource.server_side_apply(body=each, **place, field_manager=_MANAGER, query_params=strict)
            lines.append(f"{kind.lower()}/{metadata['name']} applied")
    except config.ConfigException as error:
        raise ConfigError(f"no Kubernetes cluster is configured here: {' '.join(str(error).split())}") from None
    except ApiException as error:
        said = f"{error.status} {error.reason} {_message(error.body)}".strip()
        raise ConfigError(f"the cluster refuses {kind}/{metadata['name']}: {said}{_remedy(said, jobs)}") from None
    except HTTPError as error:
        raise ConfigError(f"the cluster does not answer: {' '.join(str(error).split())[:300]}") from None
    return lines


def _message(body: Any) -> str:
    """What the API says of an error, in one line."""
    with suppress(ValueError, TypeError, KeyError):
        return " ".join(str(json.loads(body)["message"]).split())[:300]
    return ""


def _namespace(config: Any, named: str | None) -> str:
    """The namespace of the current context."""
    try:
        return str(config.list_kube_config_contexts(named)[1]["context"].get("namespace") or "default")
    except config.ConfigException:  # in a pod
        return "default"
