"""Prints the requirements of one of Shoal's distributions, so that an image can install third-party
packages and Shoal's own packages in separate layers.

    python docker/requirements.py coordinator          # third-party requirements, one per line,
                                                       for pip install -r
    python docker/requirements.py coordinator --own    # folders of Shoal's distributions,
                                                       dependencies first

Reads only the pyproject.toml files: neither pip nor an installed package is needed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("protos", "common", "coordinator", "ps_server", "worker", "sdk")
ROOT = Path(__file__).resolve().parent.parent

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<extras>[^]]*)\])?")


def own_distributions(folder: str, *, root: Path = ROOT) -> list[str]:
    """Returns the folders of Shoal's distributions that `folder` needs, dependencies first."""
    return [name for name, _ in _walk(folder, root)]


def third_party(folder: str, *, root: Path = ROOT) -> list[str]:
    """Returns the third-party requirements of `folder` and of all distributions that it needs."""
    return sorted(
        {requirement for _, requirements in _walk(folder, root) for requirement in requirements},
        key=str.lower,
    )


def _walk(folder: str, root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each required distribution of Shoal once, depth first, with its third-party
    requirements. Extras of Shoal's distributions are included if they are required."""
    projects = {
        name: tomllib.loads((root / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name in FOLDERS
    }
    folder_of = {str(project["name"]): name for name, project in projects.items()}
    wanted: dict[str, set[str]] = {}  # folder -> extras, in the order first met

    def want(name: str, extras: set[str]) -> None:
        if name in wanted and extras <= wanted[name]:
            return
        wanted[name] = wanted.get(name, set()) | extras
        for requirement in _requirements(projects[name], wanted[name]):
            match = _REQUIREMENT.match(requirement)
            if match and match["name"] in folder_of:
                want(
                    folder_of[match["name"]],
                    {
                        extra.strip()
                        for extra in (match["extras"] or "").split(",")
                        if extra.strip()
                    },
                )

    want(folder, set())
    for name in FOLDERS:  # which stand in the order of their imports
        if name in wanted:
            requirements = _requirements(projects[name], wanted[name])
            yield (
                name,
                [
                    line
                    for line in requirements
                    if (match := _REQUIREMENT.match(line)) and match["name"] not in folder_of
                ],
            )


def _requirements(project: dict[str, object], extras: set[str]) -> list[str]:
    optional = project.get("optional-dependencies", {})
    assert isinstance(optional, dict)
    plain = project.get("dependencies", [])
    assert isinstance(plain, list)
    return [*plain, *(line for extra in sorted(extras) for line in optional[extra])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("distribution", choices=FOLDERS)
    parser.add_argument(
        "--own", action="store_true", help="print the folders of Shoal's distributions instead"
    )
    arguments = parser.parse_args()
    lines = (
        own_distributions(arguments.distribution)
        if arguments.own
        else third_party(arguments.distribution)
    )
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
