"""Decides which wheels a machine without network lacks, from the output of `pip list` there. Pure:
it fetches and installs nothing.
"""

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
    """The machine cannot be provided for: the message says what is missing and what to do."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine without network: its Python, and the packages installed there."""

    python: str
    """Version of its interpreter: "3.12", or "3.12.3" where it matters to a requirement's marker.
    """
    installed: Mapping[str, str]
    """Version by canonical package name."""

    @property
    def minor(self) -> str:
        """Major and minor version of its interpreter."""
        return ".".join(self.python.split(".")[:2])

    def has(self, name: str, wanted: SpecifierSet) -> bool:
        """Returns whether a version that satisfies `wanted` is installed."""
        version = self.installed.get(name)
        return version is not None and wanted.contains(version, prereleases=True)

    def applies(self, marker: Marker | None, extras: Iterable[str]) -> bool:
        """Returns whether a requirement with this marker holds on the machine, for one of the
        extras or for none."""
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
    """Returns version by canonical name from the output of `pip list`, in any of its formats
    (columns, freeze, json).

    Raises PlanningError where a line is in none of them.
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
    """Returns version by canonical name from a constraints file."""
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
    """Returns the packages that the machine lacks, with the pinned version of each, for `roots` and
    all that they require.

    A package counts as there if its version satisfies every requirement, and what it requires
    itself is not asked for then. `requirements_of` gives the requirements of a package by its
    canonical name.

    Raises PlanningError where torch is missing or of another version than required, or where a
    package is not pinned.
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
