"""The manifests of docker/kubernetes: their fields exist, their names refer to something, and their
pods have few privileges.

The schemas are those of Kubernetes. The schemas of JobSet and of Kubeflow's Trainer are not
available here. SCHEMAS covers the fields that the manifests use, and the Jobs within are checked
against the schema of Kubernetes.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from tests.pods import FOLDER, ROOT, Manifest, Pod, all_documents, jobs, workloads

VERSION: Final = "1.33"
DOCUMENTS = all_documents()
PODS = [
    Pod(workload["metadata"]["name"], workload)
    for _, document in DOCUMENTS
    for workload in workloads(document)
]
OVERLAYS = ("jobset", "kubeflow")

_ANY: Final = {"type": "object"}
_JOBS: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicatedJobs"],
    "properties": {
        "failurePolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"maxRestarts": {"type": "integer", "minimum": 0}},
        },
        "replicatedJobs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "template"],
                "properties": {
                    "name": {"type": "string"},
                    "replicas": {"type": "integer"},
                    "template": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
                    },
                },
            },
        },
    },
}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "jobset.x-k8s.io/v1alpha2/JobSet": _JOBS,
    "trainer.kubeflow.org/v1alpha1/TrainingRuntime": {
        "type": "object",
        "additionalProperties": False,
        "required": ["template"],
        "properties": {
            "mlPolicy": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"numNodes": {"type": "integer", "minimum": 1}},
            },
            "template": {
                "type": "object",
                "additionalProperties": False,
                "required": ["spec"],
                "properties": {"spec": _JOBS},
            },
        },
    },
    "trainer.kubeflow.org/v1alpha1/TrainJob": {
        "type": "object",
        "additionalProperties": False,
        "required": ["runtimeRef"],
        "properties": {
            "runtimeRef": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {name: {"type": "string"} for name in ("apiGroup", "kind", "name")},
            },
            "trainer": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"numNodes": {"type": "integer", "minimum": 1}},
            },
        },
    },
}


def check(document: Manifest) -> None:
    """Raises an error if the resource has a field that does not exist or a value of the wrong
    type."""
    import kubernetes_validate

    own = SCHEMAS.get(f"{document['apiVersion']}/{document['kind']}")
    if own is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document["spec"], own)
    for job in jobs(document) if document["kind"] != "TrainJob" else ():
        kubernetes_validate.validate(job, VERSION, strict=True)


def names(value: object) -> str:
    return (
        f"{value['kind']}-{value['metadata']['name']}"
        if isinstance(value, dict) and "kind" in value
        else ""
    )


@pytest.mark.parametrize("document", [document for _, document in DOCUMENTS], ids=names)
def test_every_field_exists_and_has_a_value_of_its_type(document: Manifest) -> None:
    check(document)


@pytest.mark.parametrize(
    "document", [document for _, document in DOCUMENTS if "spec" in document], ids=names
)
def test_unknown_field_is_found(document: Manifest) -> None:
    import kubernetes_validate

    wrong = copy.deepcopy(document)
    wrong["spec"]["replicaz"] = 1
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check(wrong)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_pod_runs_as_an_unprivileged_user_and_writes_only_to_its_volumes(pod: Pod) -> None:
    of_pod = pod.spec["securityContext"]
    assert of_pod["runAsNonRoot"] is True
    assert (of_pod["runAsUser"], of_pod["runAsGroup"], of_pod["fsGroup"]) == (10001,) * 3
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_pod_gets_exactly_the_secrets_it_names(pod: Pod) -> None:
    text = yaml.safe_dump([pod.container.get("env"), pod.container["args"]])
    (secret,) = (mount["secret"] for mount in pod.mounts.values() if "secret" in mount)
    assert {item["path"] for item in secret["items"]} == set(
        re.findall(r"/run/secrets/(\w+)", text)
    )
    assert all(item["key"] == item["path"] for item in secret["items"])
    made = (ROOT / "docker/make_secrets.py").read_text()
    assert all(f'"{item["key"]}"' in made or "_token" in item["key"] for item in secret["items"])


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_mounts_of_a_pod_are_declared(pod: Pod) -> None:
    declared = {(document["kind"], document["metadata"]["name"]) for _, document in DOCUMENTS}
    generated = {generator["name"] for generator in kustomization("base")["configMapGenerator"]}
    for volume in pod.mounts.values():
        if "persistentVolumeClaim" in volume:
            assert (
                "PersistentVolumeClaim",
                volume["persistentVolumeClaim"]["claimName"],
            ) in declared
        if "configMap" in volume:
            assert volume["configMap"]["name"] in generated


def test_each_host_that_a_pod_talks_to_is_a_service_with_that_port() -> None:
    services = {
        document["metadata"]["name"]: {port["port"] for port in document["spec"]["ports"]}
        for _, document in DOCUMENTS
        if document["kind"] == "Service"
    }
    secrets = (ROOT / "docker/make_secrets.py").read_text()
    text = (
        yaml.safe_dump([[pod.container.get("env"), pod.container["args"]] for pod in PODS])
        + secrets
    )
    used = re.findall(r"(?<![\w.])(coordinator|redis):(\d+)", text)
    assert {host for host, _ in used} == {"coordinator", "redis"}
    for host, port in used:
        assert int(port) in services[host]


def test_each_service_targets_ports_of_a_pod() -> None:
    by_label = {
        pod.workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: pod
        for pod in PODS
    }
    for _, document in DOCUMENTS:
        if document["kind"] == "Service":
            pod = by_label[document["spec"]["selector"]["app.kubernetes.io/name"]]
            ports = {port["containerPort"] for port in pod.container["ports"]}
            assert {port["port"] for port in document["spec"]["ports"]} <= ports


def test_services_start_as_in_their_images_and_servers_keep_each_jobs_data_apart() -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    commands = [
        yaml.safe_load(command)
        for command in re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    ]
    by_name = {pod.name: pod for pod in PODS}
    for name, added in (("coordinator", ""), ("ps-server", "/$(SHOAL_PS_SERVER_JOB)")):
        *arguments, last = by_name[name].container["args"]
        assert [*arguments, last.removesuffix(added)] in commands
        assert last.endswith(added)
        assert "command" not in by_name[name].container, (
            "the image's entry point must run: it puts secrets into the environment"
        )


def test_workers_of_jobset_and_of_kubeflow_are_the_same() -> None:
    worker, node = (
        Pod(job["metadata"]["name"], job)
        for _, document in DOCUMENTS
        for job in workloads(document)
        if job["kind"] == "Job"
    )
    assert {**worker.container, "name": ""} == {**node.container, "name": ""}
    assert worker.spec["volumes"] == node.spec["volumes"]


def kustomization(folder: str) -> Manifest:
    found: Manifest = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())
    return found


@pytest.mark.parametrize("folder", ["base", "servers", *OVERLAYS])
def test_kustomization_lists_the_files_beside_it(folder: str) -> None:
    listed = {name for name in kustomization(folder)["resources"] if name != "../base"}
    assert listed == {path.name for path in (FOLDER / folder).glob("*.yaml")} - {
        "kustomization.yaml"
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("servers", [False, True])
def test_kustomize_renders_an_overlay_as_its_files_say(
    overlay: str, servers: bool, tmp_path: Path
) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize, is not on PATH")
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / overlay
    if servers:
        content = {**kustomization(overlay), "components": ["../servers"]}
        (path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    answer = subprocess.run(
        ["kubectl", "kustomize", str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    made = [document for document in yaml.safe_load_all(answer.stdout) if document]
    for document in made:
        check(document)
    folders = {"base", overlay, *(["servers"] if servers else [])}
    expected = {
        (document["kind"], document["metadata"]["name"])
        for path, document in DOCUMENTS
        if path.parent.name in folders
    }
    assert {(document["kind"], document["metadata"]["name"]) for document in made} == expected | {
        ("ConfigMap", "train")
    }
