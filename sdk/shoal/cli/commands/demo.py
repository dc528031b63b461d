"""`shoal demo`: passes all its arguments on to the demo."""

from __future__ import annotations

import typer


def demo(context: typer.Context) -> None:
    """Train on handwritten digits on a local cluster while workers and servers are killed."""
    import shoal.demo

    raise typer.Exit(shoal.demo.main(context.args))
