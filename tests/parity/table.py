"""Generates docs/parity.md, the matrix as a table, from the cells that the tests run. Written by
`python -m tests.parity PATH` after the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from tests.parity.cells import (
    ASYNC,
    BACKENDS,
    CHECKS,
    COMPRESSORS,
    MODELS,
    REFUSED_VARIATIONS,
    ROWS,
    SERVERS,
    WORLDS,
    Cell,
    Compressed,
    cells,
    part,
    refused_compression,
)
from tests.parity.variations import VARIATIONS

_SIGNS = {"float64": "d", "float32": "s", "bitwise": "b"}
_MODELS = {
    "mlp": "MLP: odd sizes, a frozen bias",
    "cnn": "CNN with BatchNorm",
    "gpt": "GPT with tied embeddings",
    "bag": "embedding bag, most rows unused",
}

_TEXT = """# The parity matrix

Each combination in the tables below trains for a few steps, and a test compares the result with
that of one process in plain torch. `make test` runs a selection that covers every row and every
column ({part} of {all}); `make parity` runs the others. The tests are in `tests/parity`, and this
page is generated from their list of combinations.

Each entry covers two optimizers: SGD with momentum and weight decay, and AdamW. The letters in an
entry mean:

{signs}

A number refers to a note at the end of the page: Shoal refuses that combination with the error in
the note. An empty entry means that the layout does not fit the number of ranks.

The single process trains on the whole batch. If a BatchNorm makes the loss depend on the grouping
of samples, the process accumulates the same micro-batches as the ranks. Gradients are clipped by
their global norm, except in the bitwise tests.

- `local_sgd`: the single process trains one replica per rank, on the samples of that rank, and
  averages the replicas' parameters every {every} steps.
- `async_sgd`: a single worker trains with its servers, because the result of several workers
  differs from that of one process.
- Pipelines split the whole batch themselves, into the same micro-batches as the single process.

{table}

{asynchronous}

The next table covers other features of a training loop, on in-memory ranks. The single process
uses the same features and the same random numbers (`tensor`, and `hybrid` without stages, use
`dropout="as_one_process"`). `r`: results agree to 1e-3 or 2e-3, because each rank rounds its sums
to bfloat16. `o`: pipeline stages draw their own random numbers; all ranks end with the same
parameters, and a second run is bitwise identical.

{variations}

The last table covers `gradient_compression=` on in-memory ranks, after 30 steps of plain SGD; all
ranks end with the same parameters. `<`: the error of the parameters, relative to how far they have
moved, is at most the compressor's rounding error. `%`: the loss decreases by at least this share of
the decrease without compression.

{compressors}
{notes}
The tables do not include nccl, because it needs a GPU. Its tests are in
`tests/unit/worker_backends/test_nccl.py`.
"""


def page() -> str:
    """Returns the text of docs/parity.md."""
    notes: list[str] = []
    places = list(itertools.product(BACKENDS, WORLDS))
    known = cells()

    def entry(row: str, model: str, backend: str, world: int) -> str:
        return _entry(
            [
                cell
                for cell in known
                if (cell.row, cell.model, cell.backend, cell.world) == (row, model, backend, world)
            ],
            notes,
        )

    table = [
        (_row(row), _MODELS[model], *(entry(row, model, *place) for place in places))
        for row, model in itertools.product(ROWS, MODELS)
    ]
    asynchronous = [
        (
            ASYNC,
            _MODELS[model],
            entry(ASYNC, model, SERVERS, 1),
            *(entry(ASYNC, MODELS[0], backend, WORLDS[0]) for backend in BACKENDS),
        )
        for model in MODELS
    ]
    variations = [
        (
            VARIATIONS[name].says,
            *(
                _said(REFUSED_VARIATIONS.get((row, name)), _letter(row, name), notes)
                for row in ROWS
            ),
        )
        for name in VARIATIONS
    ]
    compressors = [
        (
            f"{name}: {asked.says}",
            *(_said(refused_compression(row, name), _bound(asked), notes) for row in ROWS),
        )
        for name, asked in COMPRESSORS.items()
    ]
    return _TEXT.format(
        all=len(known),
        part=len(part()),
        signs="\n".join(f"- `{_SIGNS[check]}`: {what}" for check, what in CHECKS.items()),
        every=ROWS["local_sgd"].options["sync_every"],
        table=_markdown(["", "", *(f"{backend} {world}" for backend, world in places)], table),
        asynchronous=_markdown(["", "", "on its servers", *BACKENDS], asynchronous),
        compressors=_markdown(["", *map(_row, ROWS)], compressors),
        variations=_markdown(["", *map(_row, ROWS)], variations),
        notes="".join(
            f"\n{number}. `ConfigurationError`: ... {text} ...\n"
            for number, text in enumerate(notes, 1)
        ),
    )


def _markdown(header: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(row: str) -> str:
    return ROWS[row].strategy + (f" ({ROWS[row].says})" if ROWS[row].says else "")


def _entry(here: Iterable[Cell], notes: list[str]) -> str:
    """Returns the letters of the checks and the notes of the refusals."""
    said: list[str] = []
    for cell in here:
        what = _said(cell.refusal, _SIGNS[cell.check], notes)
        if what not in said:
            said.append(what)
    return " ".join(said)


def _said(refusal: str | None, letter: str, notes: list[str]) -> str:
    if refusal is None:
        return letter
    if refusal not in notes:
        notes.append(refusal)
    return str(notes.index(refusal) + 1)


def _letter(row: str, variation: str) -> str:
    if ROWS[row].pipelined and VARIATIONS[variation].draws:
        return "o"
    if ROWS[row].divided and VARIATIONS[variation].divided_tolerance is not None:
        return "r"
    if VARIATIONS[variation].tolerance > 1e-5:
        return "r"
    return "d" if VARIATIONS[variation].dtype is torch.float64 else "s"


def _bound(asked: Compressed) -> str:
    return "<" if asked.learned is None else f"{asked.learned:.0%}"
