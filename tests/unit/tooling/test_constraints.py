"""constraints.txt pins exactly the packages that `make` installs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("protos", "common", "coordinator", "ps_server", "worker", "sdk")
PROJECTS = {
    folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in FOLDERS
}
OWN = {canonicalize_name(project["name"]) for project in PROJECTS.values()}
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINNED = {
    canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
    for pin in PINS
    if pin.marker is None or pin.marker.evaluate()
}


def asked_for() -> Iterator[Requirement]:
    """Yields the requirements of the developers' installation: every distribution with all its
    extras, and the tools."""
    for project in PROJECTS.values():
        extras = [
            line for lines in project.get("optional-dependencies", {}).values() for line in lines
        ]
        yield from map(Requirement, [*project.get("dependencies", []), *extras])
    for line in (ROOT / "dev-requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield Requirement(line)


def needed() -> set[str]:
    """Returns the names of all required packages and of their dependencies on this machine."""
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(asked_for())
    while pending:
        requirement = pending.pop()
        asked = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if asked in seen:
            continue
        seen.add(asked)
        try:
            metadata = distribution(requirement.name)
        except PackageNotFoundError:  # an extra that developers do not install
            continue
        for line in metadata.requires or []:
            further = Requirement(line)
            if further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                pending.append(further)
    return {name for name, _ in seen} - OWN


def test_every_package_that_make_installs_is_pinned_and_every_pin_is_needed() -> None:
    # A CUDA build of torch brings its own libraries, at versions that it pins itself.
    wanted = {
        name for name in needed() if not name.startswith(("nvidia-", "cuda-")) and name != "triton"
    }
    assert wanted - set(PINNED) == set(), "not pinned: add them to constraints.txt"
    assert set(PINNED) - wanted == set(), "not needed: remove them from constraints.txt"


def test_installed_packages_match_the_pins() -> None:
    for name, version in PINNED.items():
        try:
            installed = distribution(name).version
        except PackageNotFoundError:
            continue
        assert installed.partition("+")[0] == version, (
            f"{name}: constraints.txt pins {version}; recreate .venv"
        )
