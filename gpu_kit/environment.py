"""Creates a Python environment on the machine without a network connection. It combines Shoal's
sources, the kit's wheels and the packages that are installed on the machine, in this order of
precedence.

Shoal is not built there. Instead, the metadata that an installation would write (names, versions
and entry points) is generated from the pyproject.toml files. Imports only the standard library.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DISTRIBUTIONS: Final = ("protos", "common", "coordinator", "ps_server", "worker", "sdk")
KIT: Final = ".gpu-kit"
MANIFEST: Final = "kit.json"
WHEELS: Final = "wheels"
PLACE: Final = Path(tempfile.gettempdir()) / "shoal-gpu-kit"
"""Directory of the environment. It is outside of the working tree, which may be copied again."""
_CHECK: Final = (
    "import torch, shoal; print('torch', torch.__version__, "
    "'CUDA', torch.cuda.is_available(), 'shoal', shoal.__version__)"
)


class SetupError(Exception):
    """Raised if the environment cannot be created; the message contains the remedy."""


def python_of(place: Path = PLACE) -> Path:
    """Returns the interpreter of the environment in `place`."""
    return place / "venv" / "bin" / "python"


def prepare(place: Path = PLACE, *, root: Path = ROOT) -> None:
    """Creates the environment, replacing an existing one, and checks that torch and Shoal can be
    imported in it.

    Raises:
        SetupError: there is no kit, or it is for a different version of Python.
        subprocess.CalledProcessError: pip or the check has failed; its output shows the reason.
    """
    wheels = _wheels(root)
    shutil.rmtree(place, ignore_errors=True)
    site = place / "site"
    site.mkdir(parents=True)
    if wheels:
        words = [
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
            "--target",
            str(site),
        ]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *words, *map(str, wheels)], check=True
        )
    for distribution in DISTRIBUTIONS:
        _write_metadata(
            site, tomllib.loads((root / distribution / "pyproject.toml").read_text())["project"]
        )
    venv.create(place / "venv", with_pip=False, symlinks=True)
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    machines_own = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    lines = [*(str(root / each) for each in DISTRIBUTIONS), str(site)]
    # Not one line for all: up to Python 3.11 a comprehension does not see what its line imports.
    lines += [f"import site; site.addsitedir({each!r})" for each in machines_own]
    packages = place / "venv" / "lib" / minor / "site-packages"
    (packages / "shoal_gpu_kit.pth").write_text("\n".join(lines) + "\n")
    _write_programs(place, root)
    subprocess.run([str(python_of(place)), "-c", _CHECK], check=True)


def _wheels(root: Path) -> list[Path]:
    manifest = root / KIT / MANIFEST
    if not manifest.exists():
        raise SetupError(
            f"{manifest} is missing: run `make gpu-kit` where there is a package index, "
            f"and copy {KIT} here"
        )
    kit = json.loads(manifest.read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if kit["python"] != here:
        raise SetupError(
            f"{KIT} is for Python {kit['python']}, and this is {here}: "
            f"run `make gpu-kit KIT_PYTHON={here}`"
        )
    return [root / KIT / WHEELS / name for name in kit["wheels"]]


def _write_programs(place: Path, root: Path) -> None:
    """Writes Shoal's commands to the interpreter's directory, where tests and benchmarks look for
    them."""
    for distribution in DISTRIBUTIONS:
        project = tomllib.loads((root / distribution / "pyproject.toml").read_text())["project"]
        for name, entry in project.get("scripts", {}).items():
            module, _, function = entry.partition(":")
            program = python_of(place).with_name(name)
            call = f"import sys; from {module} import {function}; sys.exit({function}())"
            program.write_text(f"#!{python_of(place)}\n{call}\n")
            program.chmod(0o755)


def _write_metadata(site: Path, project: dict[str, Any]) -> None:
    """Writes the metadata of a distribution that importlib.metadata reads. `project`: the table
    `project` of its pyproject.toml."""
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (folder / "INSTALLER").write_text("gpu_kit\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, points in groups.items():
        lines += (
            [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
            if points
            else []
        )
    (folder / "entry_points.txt").write_text("\n".join(lines))
