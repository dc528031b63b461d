"""`shoal demo`: passes all arguments to the demo."""

from __future__ import annotations

import typer


def demo(context: typer.Context) -> None:
    """Train on digits on a local cluster, with faults."""
    import shoal.demo

    raise typer.Exit(shoal.demo.main(context.args))
