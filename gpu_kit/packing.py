"""Downloads the wheels that a machine without a network connection lacks, into `.gpu-kit` on the
development machine. Shoal itself is copied as source code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from gpu_kit.environment import DISTRIBUTIONS, KIT, MANIFEST, ROOT, WHEELS
from gpu_kit.wheels import Machine, PlanningError, lacking, parse_pins

TEST_TOOLS: Final = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "trustme")
"""Packages that tests/gpu and benchmarks/gpu import in addition to Shoal's own requirements."""
MOST_BYTES: Final = 64 << 20
"""Maximum size of the transferred working tree, including the kit."""
_GLIBC: Final = ("2_28", "2_27", "2_17", "2_12", "2_5")
_MANYLINUX: Final = (
    *(f"manylinux_{each}_x86_64" for each in _GLIBC),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)


def pack(machine: Machine, *, root: Path = ROOT) -> str:
    """Downloads the wheels that the machine lacks, and removes other wheels from the kit. Returns
    a sentence about the number of wheels and the size of the working tree that is to be copied.

    Raises:
        PlanningError: the machine lacks torch, a package is not pinned, or the working tree would
            be too large.
        subprocess.CalledProcessError: pip could not download a wheel.
    """
    pins = parse_pins((root / "constraints.txt").read_text())
    missing = lacking(required(root), machine, pins=pins, requirements_of=_installed_requirements)
    folder = _open_folder(root / KIT, machine)
    _fetch(_to_fetch(missing, folder), machine, folder)
    wheels = sorted(each.name for each in folder.glob("*.whl"))
    (root / KIT / MANIFEST).write_text(
        json.dumps({"python": machine.minor, "wheels": wheels}, indent=1) + "\n"
    )
    travelling = _size_of_tree(root)
    if travelling > MOST_BYTES:
        raise PlanningError(
            f"{travelling >> 20} MiB would travel; expected at most {MOST_BYTES >> 20}: "
            "remove large untracked files"
        )
    return (
        f"{len(wheels)} wheels for Python {machine.minor} in {KIT}; "
        f"{travelling / 2**20:.1f} of {MOST_BYTES >> 20} MiB travel"
    )


def required(root: Path) -> list[Requirement]:
    """Returns the third-party packages that Shoal's distributions and the tests require."""
    projects = [
        tomllib.loads((root / each / "pyproject.toml").read_text())["project"]
        for each in DISTRIBUTIONS
    ]
    own = {canonicalize_name(project["name"]): project for project in projects}
    found = [Requirement(tool) for tool in TEST_TOOLS]
    for project in projects:
        for text in project["dependencies"]:
            requirement = Requirement(text)
            if (needed := own.get(canonicalize_name(requirement.name))) is None:
                found.append(requirement)
            else:
                extras = needed.get("optional-dependencies", {})
                found += [
                    Requirement(each) for extra in requirement.extras for each in extras[extra]
                ]
    return found


def _installed_requirements(name: str) -> Iterable[str]:
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        raise PlanningError(
            f"{name}, which the machine lacks, is not installed here, so its requirements are "
            "unknown: give the full version of the machine's Python (3.12.3), or install it here"
        ) from None


def _open_folder(kit: Path, machine: Machine) -> Path:
    """Returns the folder for the wheels. Empties it if its wheels are for a different version of
    Python, or if an earlier download was not completed.

    Deletes the manifest, which the caller writes again once all wheels are in the folder.
    """
    manifest, folder = kit / MANIFEST, kit / WHEELS
    if not manifest.exists() or json.loads(manifest.read_text())["python"] != machine.minor:
        shutil.rmtree(folder, ignore_errors=True)
    manifest.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _to_fetch(missing: Mapping[str, str], folder: Path) -> list[str]:
    """Returns the packages in `missing` for which `folder` has no wheel, as `name==version`.
    Removes wheels of other packages and versions."""
    there = {}
    for wheel in folder.glob("*.whl"):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if missing.get(name) == str(version):
            there[str(name)] = wheel
        else:
            wheel.unlink()
    return [f"{name}=={version}" for name, version in missing.items() if name not in there]


def _fetch(pins: list[str], machine: Machine, folder: Path) -> None:
    if not pins:
        return
    platforms = [word for each in _MANYLINUX for word in ("--platform", each)]
    words = [
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        machine.minor,
        *platforms,
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *words, "--dest", str(folder), *pins], check=True
    )


def _size_of_tree(root: Path) -> int:
    """Returns the total size in bytes of the kit and of all files in the working tree that git does
    not ignore."""
    git = shutil.which("git")
    assert git is not None, "the working tree is git's"
    listed = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [root / name for name in listed.stdout.split("\0") if name]
    files += [each for each in (root / KIT).rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files if each.is_file())
