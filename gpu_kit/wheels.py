"""Determines which wheels a machine without a network connection lacks, from the output of `pip
list` on that machine. Pure: it downloads and installs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

TORCH = "torch"


class PlanningError(Exception):
    """Raised if no kit can be made for the machine. The message contains the cause and the
    remedy."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine without a network connection: its version of Python and its installed
    packages."""

    python: str
    """Version of its interpreter, such as "3.12"; or "3.12.3", if a requirement's marker depends on
    the patch version."""
    installed: Mapping[str, str]
    """Installed version of each package, by canonical name."""

    @property
    def minor(self) -> str:
        """Major and minor version of the interpreter, such as "3.12"."""
        return ".".join(self.python.split(".")[:2])

    def has(self, name: str, wanted: SpecifierSet) -> bool:
        """Returns whether a version of the package `name` that satisfies `wanted` is installed."""
        version = self.installed.get(name)
        return version is not None and wanted.contains(version, prereleases=True)

    def applies(self, marker: Marker | None, extras: Iterable[str]) -> bool:
        """Returns whether a requirement with this marker applies on the machine, either without
        extras or with one of `extras`."""
        return marker is None or any(
            marker.evaluate({**self._marker_environment(), "extra": extra})
            for extra in ("", *extras)
        )

    def _marker_environment(self) -> dict[str, str]:
        full = self.python if self.python.count(".") > 1 else f"{self.python}.0"
        return {
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": full,
            "python_version": self.minor,
            "sys_platform": "linux",
        }


def parse_pip_list(text: str) -> dict[str, str]:
    """Parses the output of `pip list` in any of its formats (columns, freeze, json). Returns the
    version of each package by canonical name.

    Raises PlanningError for a line in any other format.
    """
    if text.lstrip().startswith("["):
        return {canonicalize_name(each["name"]): each["version"] for each in json.loads(text)}
    found = {}
    for line in text.splitlines():
        words = line.replace("==", " ").split()
        if (
            not words
            or words[:2] == ["Package", "Version"]
            or set(words[0]) == {"-"}
            or line.startswith(("#", "[notice]", "WARNING"))
        ):
            continue
        if len(words) < 2 or not re.match(r"\d", words[1]):
            raise PlanningError(
                f"pip list: {line!r} is not a package and its version; "
                "expected the output of `python -m pip list`"
            )
        found[canonicalize_name(words[0])] = words[1]
    return found


def parse_pins(constraints: str) -> dict[str, str]:
    """Parses a constraints file. Returns the pinned version of each package by canonical name."""
    pins = {}
    for line in constraints.splitlines():
        pin = line.partition("#")[0].partition(";")[0].strip()
        if pin:
            name, _, version = pin.partition("==")
            pins[canonicalize_name(name.strip())] = version.strip()
    return pins


def lacking(
    roots: Iterable[Requirement],
    machine: Machine,
    *,
    pins: Mapping[str, str],
    requirements_of: Callable[[str], Iterable[str]],
) -> dict[str, str]:
    """Returns the packages that the machine lacks, each with its pinned version. These are the
    packages in `roots` and, recursively, the requirements of missing packages.

    An installed package is not missing if its version satisfies all requirements; its own
    requirements are then not examined.

    Args:
        roots: requirements to satisfy.
        machine: the machine.
        pins: pinned version of each package by canonical name.
        requirements_of: returns the requirements of a package, given its canonical name.

    Raises:
        PlanningError: torch is missing or does not have the required version, or a missing package
            is not pinned.
    """
    wanted: dict[str, SpecifierSet] = {}
    missing: dict[str, str] = {}
    descended: set[tuple[str, frozenset[str]]] = set()
    queue = [each for each in roots if machine.applies(each.marker, ())]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
        if machine.has(name, wanted[name]):
            continue
        if name == TORCH:
            there = machine.installed.get(TORCH, "none")
            raise PlanningError(
                f"torch on the machine: {there}; expected torch{wanted[name]}, "
                "which is too large to travel: choose a machine that has it"
            )
        if name not in pins:
            raise PlanningError(
                f"constraints.txt pins no {name}, which the machine lacks: add a pin"
            )
        missing[name] = pins[name]
        extras = frozenset(requirement.extras)
        if (name, extras) not in descended:
            descended.add((name, extras))
            required = [Requirement(each) for each in requirements_of(name)]
            queue += [each for each in required if machine.applies(each.marker, extras)]
    return dict(sorted(missing.items()))
