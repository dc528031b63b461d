"""`shoal plan`: estimates the cost of a model under each strategy without starting anything."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

_EXPECTED = (
    "(model, optimizer), (model, optimizer, inputs) or (model, optimizer, inputs, targets, loss_fn)"
)


def plan(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function, in a module or a file, that takes no arguments and returns "
            f"{_EXPECTED}. inputs, targets and loss_fn are those of `train_step`.",
            show_default=False,
        ),
    ],
    world_size: Annotated[int, typer.Option(help="Number of ranks.", show_default=False)],
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each rank, as in 80GB or 80GiB. Default: unlimited.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples per step over all ranks. Default: the number of samples in the inputs, "
            "times the number of ranks.",
            show_default=False,
        ),
    ] = None,
    ranks_per_host: Annotated[
        int, typer.Option(help="Number of ranks per host, which share the host's network links.")
    ] = 8,
    device_flops: Annotated[
        str,
        typer.Option(
            help="Peak floating-point operations per second of a device. Default: those of an "
            "A100 in bfloat16.",
            metavar="RATE",
        ),
    ] = "312T",
    efficiency: Annotated[
        float, typer.Option(help="Fraction of --device-flops that training reaches.")
    ] = 0.4,
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Bandwidth from a rank to other hosts, as in 12.5GB/s or 100Gbit/s.",
            metavar="RATE",
        ),
    ] = ("100Gbit/s"),
    local_bandwidth: Annotated[
        str,
        typer.Option(
            help="Bandwidth from a rank to other ranks on its host, in the same notation.",
            metavar="RATE",
        ),
    ] = "150GB/s",
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            help="Recompute the activations of blocks instead of keeping them.",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all device meshes, not only the best ones.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, in bytes and seconds.")
    ] = False,
) -> None:
    """Estimate what each strategy would cost for a model: memory, bytes sent, and the time of a
    step.

    Nothing is started and no device is needed. The parameters get no values, if the code of the
    model allows that.
    """
    from shoal_worker.config import ShardingConfiguration
    from shoal_worker.planning.plan import render
    from shoal_worker.planning.planner import plan as planned

    model, optimizer, *rest = _made(subject)
    inputs, targets, loss_fn = (*rest, None, None, None)[:3]
    found = planned(
        model,
        optimizer,
        world_size=world_size,
        device_memory=device_memory,
        example=inputs,
        targets=targets,
        loss_fn=loss_fn,
        global_batch_size=global_batch_size,
        config=ShardingConfiguration(activation_checkpointing=activation_checkpointing),
        ranks_per_host=ranks_per_host,
        device_flops=device_flops,
        efficiency=efficiency,
        bandwidth=bandwidth,
        local_bandwidth=local_bandwidth,
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        typer.echo(render(found, everything=everything))


def _made(subject: str) -> tuple[nn.Module, Any, Any]:
    """Calls the user's function that creates the model, with the meta device as the default device.
    If the call fails, calls the function again without the meta device."""
    import torch

    function = _function(subject)
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        # any error raised by the user's code on the meta device; if the second call fails too, its
        # error is reported
        typer.echo(
            f"shoal plan: {subject} does not run on the meta device ({type(error).__name__}: "
            f"{_first_line(error)}); creating the model with its values on the CPU instead",
            err=True,
        )
        made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3, 5):
        described = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise ConfigurationError(f"{subject} returned {described}; expected {_EXPECTED}")
    return made


def _function(subject: str) -> Callable[[], Any]:
    name, colon, attribute = subject.rpartition(":")
    if not colon or not name or not attribute:
        raise ConfigurationError(
            f"MODULE:FUNCTION={subject!r}: expected a module or a file, a colon and a function, as "
            "in train:make"
        )
    module = _module(subject, name)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = ", ".join(
            sorted(
                key
                for key, value in vars(module).items()
                if callable(value) and not key.startswith("_")
            )[:8]
        )
        raise ConfigurationError(
            f"MODULE:FUNCTION={subject!r}: {name} has no function {attribute!r}; its functions: "
            f"{there or 'none'}"
        )
    made: Callable[[], Any] = found
    return made


def _module(subject: str, name: str) -> Any:
    file = Path(name)
    if file.suffix == ".py":
        if not file.is_file():
            raise ConfigurationError(f"MODULE:FUNCTION={subject!r}: the file {name} does not exist")
        sys.path.insert(0, str(file.parent.absolute()))
        name = file.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports does not
        raise ConfigurationError(
            f"MODULE:FUNCTION={subject!r}: module {name!r} is neither in {Path.cwd()} nor "
            "installed; pass its path with .py, or run the command where it can be imported"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
