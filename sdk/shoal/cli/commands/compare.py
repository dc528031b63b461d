"""`shoal compare`: compares the tensors of two checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer


def compare(
    one: Annotated[
        str,
        typer.Argument(
            metavar="ONE",
            help="Directory or URL of checkpoints, whose newest one is read; one checkpoint in it "
            "(`step-100`); a file with a model's state dict, written by torch.save or in the "
            "safetensors format; or a directory with one such safetensors file, such as an "
            "adapter.",
            show_default=False,
        ),
    ],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The same, as ONE.", show_default=False)
    ],
) -> None:
    """Compare the tensors of two checkpoints, bit for bit.

    Compares model, optimizer and registered objects. Strategies and numbers of ranks may differ.
    With a file, compares only the model. Shows how many tensors differ and by how much; a relative
    difference is relative to the largest value in the tensor. The exit status is 0 if all tensors
    are equal, otherwise 1.
    """
    from shoal_worker.checkpoint.comparison import compare as compared
    from shoal_worker.checkpoint.comparison import open_tensors
    from shoal_worker.checkpoint.place import downloaded
    from shoal_worker.settings import WorkerSettings

    settings = WorkerSettings.load()
    with ExitStack() as closing:
        paths = [closing.enter_context(downloaded(each, settings)) for each in (one, other)]
        result = compared(*(open_tensors(path, closing) for path in paths))
        typer.echo(str(result))
    if not result.equal:
        raise typer.Exit(1)
