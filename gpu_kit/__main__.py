"""Command line of the kit: `python -m gpu_kit pack` on the development machine (`make gpu-kit`),
and `python3 -m gpu_kit run SECONDS` on the machine with the GPU."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_kit.environment import PLACE, ROOT, SetupError, prepare, python_of
from gpu_kit.runner import Runner
from gpu_kit.stages import STAGE_NAMES, chosen_stages

_DEFAULT_PYTHON: Final = "3.12"
_DEFAULT_PACKAGES: Final = "torch==2.11.0+cu130\nnumpy==2.5.2\nsafetensors==0.8.0\n"
"""Packages assumed to be on the machine if nobody gives its `pip list`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands and returns its exit status."""
    options = _parse(arguments)
    if options.command == "pack":
        return _pack(options)
    if options.command == "setup":
        return _setup()
    return _run(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_kit", description="Run GPU tests and benchmarks without network."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="fetch the wheels that a machine lacks into .gpu-kit")
    pack.add_argument(
        "--python",
        default=_DEFAULT_PYTHON,
        help="version of its interpreter, 3.12 or 3.12.3; default: %(default)s",
    )
    pack.add_argument(
        "--pip-list",
        type=Path,
        help="output of `pip list` there; default: torch 2.11.0+cu130, numpy, safetensors",
    )
    commands.add_parser(
        "setup", help="make the environment on the machine; the first stage of run does"
    )
    run = commands.add_parser("run", help="run the stages on the machine")
    run.add_argument(
        "seconds",
        type=float,
        nargs="?",
        default=560.0,
        help="limit for all stages; default: %(default)g",
    )
    run.add_argument(
        "--stages", default="", help=f"comma-separated, of {', '.join(STAGE_NAMES)}; default: all"
    )
    run.add_argument(
        "--output", type=Path, help="folder for the results; default: $OUT, or out/gpu-kit"
    )
    run.add_argument(
        "--rehearse",
        action="store_true",
        help="try the stages on the host: tiny sizes, tests collected but not run",
    )
    options = parser.parse_args(arguments)
    if options.command == "run":
        options.stages = [each for each in options.stages.split(",") if each]
        if unknown := [each for each in options.stages if each not in STAGE_NAMES]:
            parser.error(
                f"no stage {', '.join(unknown)}; expected some of {', '.join(STAGE_NAMES)}"
            )
    return options


def _pack(options: argparse.Namespace) -> int:
    from gpu_kit.packing import pack
    from gpu_kit.wheels import Machine, PlanningError, parse_pip_list

    text = _DEFAULT_PACKAGES if options.pip_list is None else options.pip_list.read_text()
    try:
        print(pack(Machine(python=options.python, installed=parse_pip_list(text))))
    except PlanningError as error:
        print(f"python -m gpu_kit pack: {error}", file=sys.stderr)
        return 1
    print("Copy the working tree with .gpu-kit to the machine; there: python3 -m gpu_kit run 560")
    return 0


def _setup() -> int:
    try:
        prepare()
    except (SetupError, subprocess.CalledProcessError) as error:
        print(f"python3 -m gpu_kit setup: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> int:
    # Ends as by Ctrl-C: the stage that runs is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = options.output or Path(os.environ.get("OUT") or ROOT / "out" / "gpu-kit")
    # The output's path is absolute: stages run in the project's root.
    runner = Runner(output.resolve(), limit_s=options.seconds, directory=ROOT)
    python = Path(sys.executable) if options.rehearse else python_of(PLACE)
    return (
        0
        if runner.run(
            chosen_stages(options.stages, python, output.resolve(), rehearsal=options.rehearse)
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
