"""Gives manifests to a cluster: through ``kubectl`` where it is installed, else through the official Python client."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Protocol

import yaml

from capt.launcher import environment
from capt.launcher.kubernetes.manifests import to_manifest
from capt.pretrain.base.errors import ConfigError, how_to_install

_MANAGER = "capt"
_JOBS = ("JobSet", "RayJob")
_ENDS = ("Completed", "Complete", "Failed")

_Object = dict[str, Any]


class _Cluster(Protocol):
    """A way to a cluster."""

    def find(self, job: _Object) -> _Object | None:
        """The job of that name that the cluster has, as far as we may read it."""

    def apply(self, objects: Sequence[_Object], job: _Object) -> list[_Object]:
        """Create or change objects of a job, and return them as the cluster has them. Raises ``ConfigError``."""


def blocked_reason() -> str:
    """Return the reason why nothing can be applied from here; empty when it can."""
    if shutil.which("kubectl") or find_spec("kubernetes"):
        return ""
    return (
        "there is neither kubectl nor Kubernetes' Python client here; install one "
        f"({how_to_install('kubernetes')}), or apply elsewhere what --dry-run prints"
    )


def apply(manifest: str) -> list[str]:
    """Create or change the objects of a manifest; returns a line for each.

    The job becomes the owner of the others, so that the cluster removes them with it. It must be there first, so the
    others are applied once more.

    Raises:
        ConfigError: there is no way to a cluster, it refuses an object, or it has a job of the name that has ended.
    """
    if reason := blocked_reason():
        raise ConfigError(reason)
    objects = list(yaml.safe_load_all(manifest))
    (job,) = [each for each in objects if each["kind"] in _JOBS]
    kubectl = shutil.which("kubectl")
    cluster: _Cluster = _Kubectl(kubectl) if kubectl else _Client()
    if found := cluster.find(job):
        _require_running(found, job)
    (uid,) = [each["metadata"]["uid"] for each in cluster.apply(objects, job) if each["kind"] == job["kind"]]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"], "uid": uid}
    others = [
        {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}} for each in objects if each is not job
    ]
    cluster.apply(others, job)
    return [f"{_named(each)} applied" for each in objects]


def _require_running(found: Mapping[str, Any], job: _Object) -> None:
    """Raise ``ConfigError`` if the job that the cluster has is one that ended: applying it would start nothing."""
    status = found.get("status") or {}
    ends = [each["type"] for each in status.get("conditions") or () if each.get("status") == "True"]
    ends.append(status.get("jobDeploymentStatus", ""))  # of a RayJob
    if end := next((end for end in ends if end in _ENDS), None):
        raise ConfigError(
            f"the cluster has {_named(job)} already, which has ended ({end}), and applying it again starts nothing"
            f"{_delete(job)}"
        )


def _named(each: Mapping[str, Any]) -> str:
    return f"{each['kind'].lower()}/{each['metadata']['name']}"


def _remedy(said: str, job: _Object) -> str:
    """Return the remedy where the API refuses to change a job that is there; empty for other refusals."""
    return _delete(job) if "immutable" in said else ""


def _delete(job: _Object) -> str:
    metadata = job["metadata"]
    # By its labels, for a job that was applied by hand does not own its other objects.
    marks = ",".join(f"{key}={value}" for key, value in metadata["labels"].items() if key.startswith("app."))
    place = f" -n {metadata['namespace']}" if metadata.get("namespace") else ""
    command = f"kubectl delete {job['kind'].lower()},configmap,networkpolicy -l {marks}{place}"
    return f"; stop and remove it ({command}), then start again: what it has saved is continued"


class _Kubectl:
    """A cluster through ``kubectl``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, job: _Object) -> _Object | None:
        done = self._run(["get", "--ignore-not-found"], [job])
        # Who may not read jobs may still apply them.
        found = _items(done.stdout) if done.returncode == 0 else []
        return found[0] if found else None

    def apply(self, objects: Sequence[_Object], job: _Object) -> list[_Object]:
        done = self._run(["apply", "--server-side"], objects)
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            raise ConfigError(f"kubectl apply: {said or f'ended with {done.returncode}'}{_remedy(said, job)}")
        return _items(done.stdout)

    def _run(self, words: Sequence[str], objects: Sequence[_Object]) -> subprocess.CompletedProcess[str]:
        command = [self._path, *words, "-f", "-", "-o", "json"]
        return subprocess.run(command, input=to_manifest(objects), capture_output=True, text=True, check=False)


def _items(text: str) -> list[_Object]:
    """The objects that ``kubectl -o json`` has printed."""
    found = json.loads(text) if text.strip() else {"items": []}
    return list(found.get("items", [found]))


class _Client:
    """A cluster through the official client: server-side apply, as ``kubectl apply --server-side`` does."""

    def __init__(self) -> None:
        from kubernetes import client, config, dynamic

        named = environment.inherited().get("KUBECONFIG")  # the client itself looks as it is imported
        with _explained():
            config.load_config(**({"config_file": named} if named else {}))
            self._cluster = dynamic.DynamicClient(client.ApiClient())
        self._namespace = _namespace(config, named)

    def find(self, job: _Object) -> _Object | None:
        from kubernetes.dynamic.exceptions import ForbiddenError, NotFoundError

        with _explained(job, job), suppress(NotFoundError, ForbiddenError):
            return dict(self._resource(job).get(**self._place(job)).to_dict())
        return None

    def apply(self, objects: Sequence[_Object], job: _Object) -> list[_Object]:
        found = []
        strict = [("fieldValidation", "Strict")]  # as kubectl: a field that is misspelt is not dropped silently
        for each in objects:
            with _explained(each, job):
                answer = self._resource(each).server_side_apply(
                    body=each, **self._place(each), field_manager=_MANAGER, query_params=strict
                )
                found.append(dict(answer.to_dict()))
        return found

    def _resource(self, each: _Object) -> Any:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        kind, version = each["kind"], each["apiVersion"]
        try:
            return self._cluster.resources.get(api_version=version, kind=kind)
        except ResourceNotFoundError:
            raise ConfigError(f"the cluster knows no {kind} of {version}: its operator is not installed") from None

    def _place(self, each: _Object) -> dict[str, str]:
        metadata = each["metadata"]
        return {"name": metadata["name"], "namespace": metadata.get("namespace") or self._namespace}


@contextmanager
def _explained(each: _Object | None = None, job: _Object | None = None) -> Iterator[None]:
    """Turn the client's errors into a line, about an object of a job."""
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except config.ConfigException as error:
        raise ConfigError(f"no Kubernetes cluster is configured here: {' '.join(str(error).split())}") from None
    except ApiException as error:
        said = f"{error.status} {error.reason} {_message(error.body)}".strip()
        what = f" {_named(each)}" if each else ""
        raise ConfigError(f"the cluster refuses{what}: {said}{_remedy(said, job) if job else ''}") from None
    except HTTPError as error:
        raise ConfigError(f"the cluster does not answer: {' '.join(str(error).split())[:300]}") from None


def _message(body: Any) -> str:
    """Return the API's error message, in one line."""
    with suppress(ValueError, TypeError, KeyError):
        return " ".join(str(json.loads(body)["message"]).split())[:300]
    return ""


def _namespace(config: Any, named: str | None) -> str:
    """The namespace of the current context."""
    try:
        return str(config.list_kube_config_contexts(named)[1]["context"].get("namespace") or "default")
    except config.ConfigException:  # in a pod
        return "default"
