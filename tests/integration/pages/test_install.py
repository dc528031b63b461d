"""docs/install.md is followed word by word: wheels are built and installed into an empty
environment, and train on two workers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.sessions import Session, blocks_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Session]:
    """A project folder beside the checkout, with the system's commands only. Its folder `shoal` is
    this checkout under the name that the page uses."""
    (tmp_path / "shoal").symlink_to(ROOT)
    folder = tmp_path / "project"
    folder.mkdir()
    dropped = ("SHOAL_", "PET_", "OMP_", "PYTHON", "VIRTUAL_ENV")
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped) or name == "SHOAL_PYTEST_RUN"
    }
    own["PATH"] = ":".join(
        part for part in own["PATH"].split(":") if not Path(part).is_relative_to(ROOT)
    )
    places = {
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    # The newest torch would take gigabytes, so the test uses the version that all tests run with.
    # pip does not compile bytecode, most of which would never be imported.
    pip = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_NO_COMPILE": "1"}
    running = Session(folder, {**own, **places, **pip}, deadline_s=400.0)
    yield running
    running.close()


@pytest.mark.images
@pytest.mark.timeout(900)
def test_wheels_train_on_two_workers_outside_the_checkout(
    project: Session,
) -> None:
    project.follow(blocks_of(ROOT / "docs" / "install.md"))
    python = project.directory / ".venv/bin/python"
    found = subprocess.run(
        [python, "-c", "import shoal; print(shoal.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(project.directory))
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    for wheel in wheels:
        assert any(name.endswith("/licenses/LICENSE") for name in ZipFile(wheel).namelist()), (
            f"{wheel.name} has no license"
        )
    extra = [*wheels, "shoal[tensorboard]"]  # in the page's order
    pip = [python, "-m", "pip", "install", "--dry-run", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *extra], check=True, timeout=300)
