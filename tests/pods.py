"""Manifests as pods: how each container of docker/kubernetes would be started, and how it is
reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docker/kubernetes"
ENTRYPOINT: Final = ("/usr/local/lib/shoal/entrypoint.sh",)
"""Entry point of the images of docker/Dockerfile, used where a manifest has only `args`."""

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    """Returns all resources of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def all_documents() -> list[tuple[Path, Manifest]]:
    """Returns all resources of the folder, without kustomize's own files."""
    files = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
    return [(path, document) for path in files for document in documents(path)]


def jobs(document: Manifest) -> Iterator[Manifest]:
    """Yields the templates of Jobs in a JobSet or a TrainingRuntime as Jobs."""
    spec = (
        document["spec"]["template"]["spec"]
        if document["kind"] == "TrainingRuntime"
        else document["spec"]
    )
    for replicated in spec.get("replicatedJobs", []):
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": replicated["name"]},
            "spec": replicated["template"]["spec"],
        }


def workloads(document: Manifest) -> Iterator[Manifest]:
    """Yields the resources that create pods: this resource, or the Jobs in it."""
    if document["kind"] in ("Deployment", "StatefulSet"):
        yield document
    elif document["kind"] in ("JobSet", "TrainingRuntime"):
        yield from jobs(document)


@dataclass(frozen=True)
class Pod:
    """One pod of a workload. It has one container."""

    name: str
    workload: Manifest

    @property
    def spec(self) -> Manifest:
        found: Manifest = self.workload["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> Manifest:
        (only,) = self.spec["containers"]
        found: Manifest = only
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Environment that the kubelet creates, with fields of the pod and $(NAME) for earlier
        variables."""
        values: dict[str, str] = {}
        for variable in self.container.get("env", []):
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, (
                    variable
                )
                values[variable["name"]] = self.name
            else:
                values[variable["name"]] = expanded(variable["value"], values)
        return values

    @property
    def command(self) -> list[str]:
        """Command line of the container. `command` replaces the image's ENTRYPOINT, `args` its
        CMD."""
        given = self.container
        return [
            *given.get("command", ENTRYPOINT),
            *(expanded(argument, self.environment) for argument in given["args"]),
        ]

    @property
    def mounts(self) -> dict[str, Manifest]:
        """The volume at each path, with `readOnly` as it is mounted."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        volumes |= {
            claim["metadata"]["name"]: {"claim": claim}
            for claim in self.workload["spec"].get("volumeClaimTemplates", [])
        }
        return {
            mount["mountPath"]: {**volumes[mount["name"]], "readOnly": mount.get("readOnly", False)}
            for mount in self.container.get("volumeMounts", [])
        }


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Expands $(NAME) as the kubelet does."""
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)
