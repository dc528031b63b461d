"""Measures tokens per second, MFU and peak memory of training a model of 1.3 billion parameters in
bf16, with plain torch, DDP, FSDP2 and Shoal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from benchmarks.gpu.context import COMMAND, NO_TARGET, Context
from benchmarks.gpu.decoder import FEW_LAYERS, LARGE, TINY, Recipe, Size, Training, in_world_of_one
from benchmarks.report import Row, Table

RECIPES: Final = (
    Recipe(name="torch", system="torch"),
    Recipe(name="torch DDP", system="ddp"),
    Recipe(name="shoal ddp", system="shoal", strategy="ddp"),
    Recipe(name="torch FSDP2, bf16 parameters", system="fsdp2", autocast=False),
    Recipe(
        name="shoal zero3, bf16 parameters",
        system="shoal",
        strategy="zero3",
        options={"param_dtype": torch.bfloat16},
        autocast=False,
    ),
    Recipe(name="shoal zero2", system="shoal", strategy="zero2"),
    Recipe(name="torch, activation checkpointing", system="torch", recompute=True),
    Recipe(
        name="shoal zero3, activation checkpointing",
        system="shoal",
        strategy="zero3",
        recompute=True,
    ),
    Recipe(
        name=f"torch, {FEW_LAYERS} layers, compiled", system="torch", compiled=True, few_layers=True
    ),
    Recipe(
        name=f"shoal ddp, {FEW_LAYERS} layers, compiled",
        system="shoal",
        strategy="ddp",
        compiled=True,
        few_layers=True,
    ),
    Recipe(
        name=f"shoal zero3, {FEW_LAYERS} layers, offload",
        system="shoal",
        strategy="zero3",
        options={"offload": "cpu"},
        few_layers=True,
    ),
    Recipe(name="torch, AdamW not fused", system="torch", fused=False),
    Recipe(name="shoal ddp, AdamW not fused", system="shoal", strategy="ddp", fused=False),
)
"""Recipes in order of value; the first ones are measured first."""
COLUMNS: Final = (
    "tokens/s",
    "MFU %",
    "peak GiB",
    "step ms",
    "step alone ms",
    "host ms",
    "first steps s",
    "loss",
)


def measure(context: Context) -> Table:
    """Measures every recipe. Takes about two minutes on an H100."""
    rows = measure_recipes(context, RECIPES)
    return Table(
        key="gpu-large",
        title=f"1.3 billion parameters in bf16 on {context.what}",
        target=NO_TARGET,
        method=(
            f"A decoder of width {LARGE.width} with {LARGE.layers} layers, {LARGE.batch} samples "
            f"of {LARGE.tokens} tokens a step, fused AdamW, bf16 autocast where nothing else is "
            "said, a world of one. Steps are timed together, and a few alone, to where the device "
            "is at rest. All take the same samples. MFU counts 6 operations for each multiplied "
            "weight, and causal attention."
        ),
        columns=COLUMNS,
        rows=tuple(rows),
        verdict="What Shoal adds is the difference to the row of torch.",
    )


def size_of(context: Context, recipe: Recipe) -> Size:
    """Returns the model size at which the recipe is measured."""
    if context.rehearsal:
        return TINY
    return dataclasses.replace(LARGE, layers=FEW_LAYERS) if recipe.few_layers else LARGE


def measure_recipes(context: Context, recipes: Sequence[Recipe]) -> list[Row]:
    """Returns a row for each recipe."""
    if context.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return [
        context.measured("large", recipe.name, lambda recipe=recipe: _row(context, recipe))
        for recipe in recipes
    ]


def _row(context: Context, recipe: Recipe) -> Row:
    size = size_of(context, recipe)
    if context.rehearsal and recipe.compiled:
        recipe = dataclasses.replace(recipe, compiled=False)  # needs a compiler, and minutes
    try:
        figures = in_world_of_one(
            recipe, context.device, lambda: Training(recipe, size, context.device).figures()
        )
    finally:
        if recipe.compiled:
            torch.compiler.reset()
    cells = {
        "tokens/s": f"{figures.tokens_per_s:.0f}",
        "peak GiB": f"{figures.peak_bytes / 2**30:.2f}",
        "step ms": f"{1e3 * figures.step_s:.2f}",
        "step alone ms": f"{1e3 * figures.synced_s:.2f}",
        "host ms": f"{1e3 * figures.host_s:.2f}",
        "first steps s": f"{figures.warm_s:.1f}",
        "loss": f"{figures.loss:.4f}",
    }
    if figures.mfu is not None:
        cells["MFU %"] = f"{100 * figures.mfu:.1f}"
    return Row(name=recipe.name, command=f"{COMMAND} large", cells=cells)
