"""The images, without an engine: each one's distributions in a virtual environment of its own, and compose.yaml's commands started from these.

No container is built here. What an image installs is read from the Dockerfile and installed the same way (docker/requirements.py, third-party
packages first, then our wheels); a service's command, environment and secrets are compose.yaml's, with the addresses and folders of a
container replaced by this test's. Installing takes a minute, so this runs in `make verify` and not in `make test`.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(
    re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text())  # each variable's default
)["services"]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
REQUIREMENTS = runpy.run_path(str(ROOT / "docker/requirements.py"))
DEADLINE_S = 60.0

pytestmark = [pytest.mark.images, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Image:
    """What one target of the Dockerfile installs."""

    target: str
    distribution: str
    bin: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.bin / command[0]), *command[1:]], capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    @property
    def default_command(self) -> list[str]:
        """CMD."""
        stage = re.search(rf"(?m)^FROM base AS {self.target}\n((?:.*\n)*?)(?=FROM |\Z)", DOCKERFILE)
        assert stage
        return list(json.loads(re.findall(r"(?m)^CMD (\[.*\])", stage[1])[-1]))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All our distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *(str(ROOT / name) for name in REQUIREMENTS["FOLDERS"])], check=True, timeout=240)
    return folder


def install(target: str, wheels: Path, folder: Path) -> Image:
    """As the Dockerfile does it."""
    distribution = re.search(rf"AS {target}-packages\n(?:.*\n)*?RUN python docker/requirements.py (\w+)", DOCKERFILE)
    assert distribution
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=60)
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(REQUIREMENTS["third_party"](distribution[1])))
    pip = [str(folder / "bin/pip"), "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), "--requirement", str(listed)], check=True, timeout=240)
    own = [wheel(wheels, name) for name in REQUIREMENTS["own_distributions"](distribution[1])]
    subprocess.run([*pip, "--no-index", "--no-deps", *own], check=True, timeout=60)
    return Image(target, distribution[1], folder / "bin")


def wheel(wheels: Path, folder: str) -> str:
    name = "shoal" if folder == "sdk" else f"shoal_{folder}"
    return str(next(wheels.glob(f"{name}-*.whl")))


@pytest.fixture(scope="module")
def coordinator_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("coordinator", wheels, tmp_path_factory)


@pytest.fixture(scope="module")
def ps_server_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("ps-server", wheels, tmp_path_factory)


@pytest.fixture(scope="module")
def worker_image(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield from installed("worker", wheels, tmp_path_factory)


def installed(target: str, wheels: Path, factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Installed, and removed again: a gigabyte with torch."""
    folder = factory.mktemp(target)
    yield install(target, wheels, folder)
    shutil.rmtree(folder)


def test_the_coordinators_image_starts_without_torch(coordinator_image: Image) -> None:
    assert coordinator_image.run("python", "-c", "import shoal_coordinator.__main__").returncode == 0
    assert "No module named 'torch'" in coordinator_image.run("python", "-c", "import torch").stderr


@pytest.mark.parametrize("target", ["coordinator", "ps-server", "worker"])
def test_the_programs_of_an_image_start_and_explain_themselves(target: str, request: pytest.FixtureRequest) -> None:
    image: Image = request.getfixturevalue(f"{target.replace('-', '_')}_image")
    helped = image.run(image.default_command[0], "--help")
    assert helped.returncode == 0, helped.stderr
    for flag in [part for part in image.default_command if part.startswith("--") and part != "--help"]:
        assert flag in helped.stdout, f"the image's command gives {flag}, which {image.default_command[0]} does not know"


def test_the_command_of_compose_has_only_flags_that_shoal_run_knows(worker_image: Image) -> None:
    command = SERVICES["worker"]["command"]
    helped = worker_image.run(*command[:2], "--help")
    assert helped.returncode == 0, helped.stderr
    for flag in [part.partition("=")[0] for part in command if part.startswith("--")]:
        assert flag in helped.stdout
