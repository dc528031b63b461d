"""Mistakes that compose itself accepts: names that do not exist, and waiting for the health of
services without a health check."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from shoal_ps_server.storage.directory import RUNS_KEPT

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def stages() -> dict[str, str]:
    """Returns the Dockerfile's stages by name. Each includes the text of the stages that it is
    built from."""
    found: dict[str, str] = {}
    for block in re.split(r"(?m)^(?=FROM )", (ROOT / "docker/Dockerfile").read_text())[1:]:
        match = re.match(r"FROM (\S+) AS (\S+)", block)
        assert match, f"a stage without a name: {block.splitlines()[0]}"
        found[match[2]] = found.get(match[1], "") + block
    return found


STAGES = stages()


def has_healthcheck(service: dict[str, Any]) -> bool:
    return "healthcheck" in service or (
        "build" in service and "HEALTHCHECK" in STAGES[service["build"]["target"]]
    )


@pytest.mark.parametrize("name", SERVICES)
def test_service_waits_only_for_existing_services_and_for_health_only_where_it_is_checked(
    name: str,
) -> None:
    for dependency, how in SERVICES[name].get("depends_on", {}).items():
        assert dependency in SERVICES, f"{name} waits for {dependency}, which does not exist"
        if how["condition"] == "service_healthy":
            assert has_healthcheck(SERVICES[dependency]), (
                f"{name} waits for the health of {dependency}, which has no health check"
            )


@pytest.mark.parametrize("name", SERVICES)
def test_a_required_dependency_runs_in_every_profile_that_its_dependent_runs_in(name: str) -> None:
    for dependency, how in SERVICES[name].get("depends_on", {}).items():
        profiles = set(SERVICES[dependency].get("profiles", []))
        runs_too = not profiles or (
            set(SERVICES[name].get("profiles", [])) and set(SERVICES[name]["profiles"]) <= profiles
        )
        assert runs_too or how.get("required") is False, (
            f"{name} needs {dependency}, which only runs with the profiles {sorted(profiles)}"
        )


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_uses_only_declared_networks_secrets_and_volumes(name: str) -> None:
    service = SERVICES[name]
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    named = {
        volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")
    }
    assert named <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_the_secrets_that_its_settings_name_and_no_others(name: str) -> None:
    service = SERVICES[name]
    text = yaml.safe_dump(
        [service.get("command"), service.get("environment"), *configuration_mounted(service)]
    )
    assert set(re.findall(r"/run/secrets/(\w+)", text)) == set(service.get("secrets", []))


def configuration_mounted(service: dict[str, Any]) -> list[str]:
    mounted = [
        ROOT / volume.split(":")[0]
        for volume in service.get("volumes", [])
        if volume.startswith("./docker/")
    ]
    return [
        path.read_text()
        for root in mounted
        for path in ([root] if root.is_file() else sorted(root.rglob("*.yml")))
    ]


def test_every_compose_declaration_is_used() -> None:
    for kind in ("networks", "secrets"):
        used = {name for service in SERVICES.values() for name in service.get(kind, [])}
        assert used == set(COMPOSE[kind])
    volumes = {
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
    }
    assert set(COMPOSE["volumes"]) <= volumes


@pytest.mark.parametrize("name", SERVICES)
def test_files_mounted_from_the_repository_exist(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        if volume.startswith("."):
            assert (ROOT / volume.split(":")[0]).exists(), f"{name} mounts {volume}"


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_our_images_run_without_root_privileges(name: str) -> None:
    stage = STAGES[SERVICES[name]["build"]["target"]]
    users = re.findall(r"(?m)^USER (\S+)", stage)
    assert users
    assert int(users[-1]) > 0


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_limits_and_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["mem_limit"]
    assert service["pids_limit"]


def test_servers_keep_the_data_of_a_run_through_all_restarts_of_failing_ones() -> None:
    policy, _, restarts = SERVICES["worker"]["restart"].partition(":")
    assert policy == "on-failure"
    assert int(restarts) < RUNS_KEPT


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_volumes_are_writable_for_the_user_that_the_image_runs_as(name: str) -> None:
    """An image creates the mount points of its volumes for its own user. Otherwise, the named
    volumes would belong to root."""
    stage = STAGES[SERVICES[name]["build"]["target"]]
    for volume in SERVICES[name].get("volumes", []):
        source, folder, *mode = volume.split(":")
        if not source.startswith(".") and mode != ["ro"]:
            assert re.search(
                rf"install --directory --owner shoal --group shoal {folder}\s", stage
            ), f"{name} cannot write to {folder}"
            assert f"VOLUME {folder}\n" in stage


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_restarts_after_a_crash_and_publishes_only_on_loopback(name: str) -> None:
    assert SERVICES[name]["restart"].partition(":")[0] in {"unless-stopped", "on-failure"}
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "name", [name for name, service in SERVICES.items() if "build" not in service]
)
def test_third_party_images_are_pinned_to_a_release(name: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


def test_redis_persists_before_it_answers_and_is_reachable_from_other_containers() -> None:
    command = shlex.join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command
    assert "--protected-mode no" in command, (
        "without a password, protected mode only answers on loopback"
    )


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("ps-server-")])
def test_parameter_server_starts_as_in_its_image_with_a_folder_for_each_job(
    name: str,
) -> None:
    (image,) = re.findall(r"(?m)^CMD (\[.*\])", STAGES[SERVICES[name]["build"]["target"]])
    *same, folder = json.loads(image)
    job = SERVICES[name]["environment"]["SHOAL_PS_SERVER_JOB"]
    assert SERVICES[name]["command"] == [*same, f"{folder}/{job}"]


def test_gpu_override_changes_existing_services_and_builds_an_existing_stage() -> None:
    for name, service in GPU["services"].items():
        assert name in SERVICES
        assert service["build"]["target"] in STAGES
        assert "healthcheck.py" in " ".join(service["healthcheck"]["test"])
    gpu, cpu = GPU["services"]["worker"]["command"], SERVICES["worker"]["command"]
    assert [part for part in gpu if part not in cpu] == ["--nproc-per-node=gpu"]


def test_the_gpu_image_has_a_compiler_for_inductor_and_runs_without_root_privileges() -> None:
    stage = STAGES[GPU["services"]["worker"]["build"]["target"]]
    assert re.search(r"apt-get install --yes --no-install-recommends g\+\+", stage)
    assert int(re.findall(r"(?m)^USER (\S+)", stage)[-1]) > 0


def test_build_context_contains_the_files_the_dockerfile_copies_and_no_secrets() -> None:
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for stage in STAGES.values():
        for copy in re.findall(r"(?m)^COPY (?!--from)(?:--\S+ )?(.+) \S+$", stage):
            for source in copy.split():
                assert (ROOT / source).exists(), source
                assert any(source == path or source.startswith(f"{path}/") for path in allowed), (
                    f".dockerignore leaves out {source}"
                )
    assert not any(path.startswith("docker/secrets") or path == "docker" for path in allowed)
