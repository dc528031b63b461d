"""The stages that run on the machine with the GPU. They are ordered by importance, because the last
ones are left out if time runs out. Imports only the standard library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpu_kit.environment import PLACE
from gpu_kit.runner import Stage

_TEST_TIMEOUT_S: Final = 100
_PARALLEL: Final = 6
"""Processes for tests that share the GPU over Gloo."""
_REHEARSAL_SLACK: Final = 4
"""Factor by which stages may take longer in a rehearsal, on a host with much other work."""
_FIGURES: Final = "figures.txt"
_ROWS: Final = "figures.jsonl"
"""File to which each row is written as soon as it has been measured."""
_PLUGINS: Final = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""Pytest plugins to load. They are named individually, because the machine may have other plugins,
whose warnings would be errors."""


def chosen_stages(
    names: Sequence[str], python: Path, output: Path, *, rehearsal: bool = False
) -> list[Stage]:
    """Returns the stages with the given names, ordered by importance.

    Args:
        names: members of `STAGE_NAMES`; empty: all stages (in a rehearsal, all except `setup`).
        python: interpreter of the environment that the stage `setup` creates.
        output: folder for the results.
        rehearsal: True to run on the host with tiny sizes, and to collect tests without running
            them.
    """
    stages = _all_stages(python, output, rehearsal=rehearsal)
    return [
        stage
        for stage in stages
        if stage.name in names or (not names and not (rehearsal and stage.name == "setup"))
    ]


def _all_stages(python: Path, output: Path, *, rehearsal: bool) -> list[Stage]:
    def tests(*words: str) -> list[str]:
        plugins = [word for each in _PLUGINS for word in ("-p", each)]
        limits = [
            "--timeout",
            str(_TEST_TIMEOUT_S),
            "--timeout-method",
            "signal",
            "-o",
            f"faulthandler_timeout={_TEST_TIMEOUT_S - 20}",
        ]
        how = (
            ["--collect-only", "-q"]
            if rehearsal
            else ["-v", "-m", "gpu and not soak", "--tb=short", "--durations=8"]
        )
        return [
            str(python),
            "-m",
            "pytest",
            *plugins,
            "-p",
            "no:cacheprovider",
            *limits,
            *how,
            *words,
        ]

    def figures(*parts: str) -> list[str]:
        how = ["--device", "cpu", "--width", "32", "--steps", "2"] if rehearsal else []
        words = ["--rows", str(output / _ROWS), "--output", str(PLACE / "tables")]
        return [str(python), "-m", "benchmarks.gpu", *how, *words, *parts]

    own_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    shared = {**own_plugins, "GPU_SHARED": "1"}
    one_device = [
        f"tests/gpu/test_{each}.py"
        for each in ("health", "one_device", "state", "graphs_and_memory", "failed_device")
    ]
    ranks_share = ["tests/gpu/test_several_devices.py", *one_device[3:]]
    over_gloo = [
        f"tests/gpu/test_{each}_on_one_device.py" for each in ("faults", "strategies", "gloo")
    ]
    stages = [
        Stage(
            name="setup",
            file="machine.txt",
            limit_s=90,
            command=[sys.executable, "-m", "gpu_kit", "setup"],
            essential=True,
        ),
        Stage(
            name="probe",
            file="machine.txt",
            limit_s=60,
            command=[str(python), "-m", "gpu_kit.probe"],
        ),
        Stage(name="pair", file="nccl.txt", limit_s=100, command=figures("pair")),
        Stage(
            name="one",
            file="one.txt",
            limit_s=140,
            command=tests(*one_device),
            environment=own_plugins,
        ),
        Stage(
            name="shared",
            file="nccl.txt",
            limit_s=170,
            command=tests("-k", "shared", *ranks_share),
            environment=shared,
            needs="pair",
        ),
        Stage(
            name="large",
            file=_FIGURES,
            limit_s=150,
            command=figures("large"),
            environment={"OMP_NUM_THREADS": "8"},
        ),
        Stage(
            name="gloo",
            file="gloo.txt",
            limit_s=150,
            command=tests(
                "-n",
                str(_PARALLEL),
                "--dist=worksteal",
                *over_gloo,
                "tests/gpu/test_ways_to_train.py",
            ),
            environment=own_plugins,
        ),
        Stage(
            name="recovery", file=_FIGURES, limit_s=90, command=figures("recovery"), needs="pair"
        ),
        Stage(name="coordinator", file=_FIGURES, limit_s=60, command=figures("coordinator")),
        Stage(name="checkpoint", file=_FIGURES, limit_s=75, command=figures("checkpoint")),
        Stage(
            name="small", file=_FIGURES, limit_s=80, command=figures("steps", "copies", "groups")
        ),
    ]
    slack = _REHEARSAL_SLACK if rehearsal else 1
    return [
        replace(
            stage,
            limit_s=stage.limit_s * slack,
            environment={"OMP_NUM_THREADS": "1", **stage.environment},
        )
        for stage in stages
    ]


STAGE_NAMES: Final = tuple(
    stage.name for stage in _all_stages(Path(sys.executable), Path(), rehearsal=True)
)
