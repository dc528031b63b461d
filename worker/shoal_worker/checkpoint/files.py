"""Checkpoints on disk: a checkpoint is either complete or absent, and can be read only if every
byte is unchanged.

A checkpoint is a directory. In the layout "whole", which one process writes:

    step-1200/
      checkpoint.json         description of the checkpoint, structure of the state, and size and
                              digest of each tensor file
      model.safetensors       the tensors under "model", by their path in that entry: for a model,
                              the names in its state_dict()
      optimizer.safetensors   ... one such file per top-level entry of the state with tensors
      frozen-...              the values of frozen parameters (`frozen.py`)
      rows-...                the rows of sparse tables (`rows.py`)

`shards.py` implements the layout "sharded", which the ranks write together. In both layouts, the
directory is created under a name that starts with a dot, flushed to the disk, and then renamed.
Nothing is pickled. `saving.py` decides which rank saves, and when.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.frozen import KEY, NOTHING, Frozen, Given, given_values
from shoal_worker.checkpoint.manifest import (
    SUFFIX,
    CheckpointInfo,
    damaged,
    disk_errors,
    make_temporary,
    publish,
    read_manifest,
    read_tensors,
    remove,
    remove_leftovers,
    write_manifest,
    write_tensors,
)
from shoal_worker.checkpoint.rows import SavedRows
from shoal_worker.checkpoint.shards import Shards, read_shards, write_pieces
from shoal_worker.state.serial import STORED_DTYPES
from shoal_worker.state.tree import Snapshot, join_path, unflatten

Place = TypeVar("Place")
"""A checkpoint's path, or its name in an object store."""

STEP = re.compile(r"step-([0-9]+)")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_AVERAGED = "module."
"""Prefix of all names in the state of an `AveragedModel` except `_COUNT`."""
_COUNT = "n_averaged"
_WHOLE = "~whole"
"""Name, in its file, of a tensor that is itself a top-level entry of the state. Names made by the
state tree never contain "~w" or "~m"."""
_RESERVED = {"__metadata__": "~metadata"}
"""Names reserved by safetensors, and their replacements."""
_ORIGINALS = {replacement: name for name, replacement in _RESERVED.items()}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has been read completely and verified."""

    info: CheckpointInfo
    state: Any
    """The state. Its tensors are on the CPU and own their memory."""
    rows: SavedRows
    """Rows of sparse tables. Their files exist but have not been read yet."""


def begin(directory: Path, step: int) -> Path:
    """Creates a temporary directory for writing the checkpoint of `step`; `finish` publishes it.
    First removes leftovers of killed processes on this host, because they may fill the disk.

    Raises:
        ConfigurationError: the directory cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        return make_temporary(directory, f"step-{step}")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write checkpoints to {directory}: {error}; choose a directory that this "
            "process may write to"
        ) from error


def finish(temporary: Path, info: CheckpointInfo, *, fence: Callable[[], None], keep: int) -> Path:
    """Publishes the directory `temporary`, which contains the complete checkpoint described by
    `info`, as `step-<n>` in the same parent directory, and returns the new path. Replaces an older
    checkpoint of the same step. Then removes older steps of the same run, except the newest `keep`
    checkpoints and the best one.

    Args:
        fence: raises if this process may no longer publish.
        keep: >= 1; the one published here is never removed.

    Raises:
        UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is failing. After this error, and after
            any error of `fence`, existing checkpoints remain, and no new one is added.
    """
    directory = temporary.parent
    target = directory / f"step-{info.step}"
    fence()
    with disk_errors(target):
        publish(temporary, target)
    remove(temporary)  # an existing checkpoint of the step has swapped places with the new one
    _prune(directory, target, info.run, keep)
    return target


def write_checkpoint(
    directory: Path,
    snapshot: Snapshot,
    info: CheckpointInfo,
    *,
    fence: Callable[[], None],
    keep: int,
    temporary: Path | None = None,
    rows: Callable[[Path], Mapping[str, Any]] = lambda temporary: {},
    frozen: Frozen = NOTHING,
) -> Path:
    """Writes a checkpoint in the layout "whole" and returns its path. Publishes the checkpoint, and
    removes older ones, like `finish`.

    Args:
        snapshot: snapshot of a mapping; its top-level keys name the tensor files.
        temporary: directory returned by `begin`, which may already contain some of the files. None:
            a new directory is created.
        rows: ensures that the rows of sparse tables are in a directory, and returns their entry for
            the manifest.
        frozen: frozen parameters of the state. The snapshot contains their values only if these are
            to be written.

    Raises:
        ConfigurationError: `keep` is less than 1, the directory cannot be created, or a top-level
            key cannot be a file's name.
        UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is full or failing; existing checkpoints
            are unchanged.
    """
    if keep < 1:
        raise ConfigurationError(f"keep={keep}: expected at least 1")
    parts = _by_part(snapshot, frozen)
    temporary = temporary or begin(directory, info.step)
    info = _with_known_metric(directory, info)
    try:
        with disk_errors(directory / f"step-{info.step}"):
            _fill(temporary, snapshot, parts, info, rows(temporary), frozen)
        return finish(temporary, info, fence=fence, keep=keep)
    finally:
        remove(temporary)


def write_sharded(
    temporary: Path,
    shards: Shards,
    info: CheckpointInfo,
    *,
    gone: Callable[[int], bool],
    fence: Callable[[], None],
    keep: int,
) -> Path | None:
    """Waits for all ranks' shards in `temporary`, completes the checkpoint and publishes it, like
    `finish`. Must be called on the first rank.

    Returns None, and removes `temporary`, if a rank left without writing its shard: the previous
    checkpoint remains the newest.

    Args:
        shards: this rank's outline of the state, and the shards that it writes itself.
        gone: returns whether the rank that writes a shard has left.

    Raises:
        UnavailableError (CHECKPOINT_NOT_WRITTEN): a disk is full or failing, or shards did not
            arrive in time; existing checkpoints are unchanged.
    """
    try:
        with disk_errors(temporary.parent / f"step-{info.step}"):
            shards.write(temporary)
            collected = shards.collect(temporary, gone=gone)
            if collected is None:
                return None
            files, once = collected
            info = _with_known_metric(temporary.parent, info)
            write_manifest(
                temporary,
                info,
                manifest.SHARDED,
                files=files,
                structure=shards.structure,
                tensors=shards.described(),
                **shards.frozen.entry(temporary, once),
            )
        return finish(temporary, info, fence=fence, keep=keep)
    finally:
        remove(temporary)


def mark_stopped_early(path: Path, loader: str) -> None:
    """Records `CheckpointInfo.stopped_early` in a complete checkpoint.

    Raises:
        CorruptDataError: as in `read_checkpoint`.
        UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is full or failing; the checkpoint is
            unchanged.
    """
    content = read_manifest(path)
    info, layout = CheckpointInfo(**content.pop("info")), content.pop("layout")
    with disk_errors(path):
        write_manifest(path, dataclasses.replace(info, stopped_early=loader), layout, **content)


def latest(directory: Path, *, run: str | None = None) -> Path | None:
    """Returns the checkpoint of the highest step in `directory`, or None if there is no checkpoint
    or no such directory. `run`: considers only checkpoints of this run; None: of any run.

    A checkpoint whose run cannot be read is treated as one of `run`.
    """
    newest_first = sorted(_checkpoints(directory), reverse=True)
    return next(
        (path for _, path in newest_first if run is None or _run_of(path) in (run, "")), None
    )


def complete_in(directory: Path) -> list[Path]:
    """Returns the checkpoints in `directory`, oldest first."""
    return [path for _, path in sorted(_checkpoints(directory))]


def best(directory: Path) -> Path | None:
    """Returns the checkpoint with the best metric among the checkpoints of the newest run. Returns
    None if no checkpoint has a metric."""
    newest = latest(directory)
    return None if newest is None else best_of(_own(directory, _run_of(newest)))


def check_place(directory: Path, step: int, run: str) -> None:
    """Raises ConfigurationError if `directory` contains a checkpoint of a different run whose step
    is later than `step`: that checkpoint would remain the newest."""
    for other, path in sorted(_checkpoints(directory), reverse=True):
        if run and other > step and _run_of(path) not in (run, ""):
            raise ConfigurationError(
                f"{directory} contains {path.name} of another run, which would count as newer "
                f"than step {step} of this run: give each run its own directory, or continue from "
                "there: call shoal.resume before the loop, or train(resume_from_checkpoint=True) "
                "of a Trainer"
            )


def read_checkpoint(path: Path, given: Given = dict, *, needed: str = "") -> Checkpoint:
    """Reads one checkpoint (`.../step-<n>`) of either layout, and verifies every file. `given`:
    provides the values of frozen parameters, if the checkpoint only refers to them. `needed`:
    prefix of the names of the frozen parameters that the caller needs; the state has meta tensors
    in place of the others.

    Raises:
        CorruptDataError: the checkpoint is damaged (FILE_CORRUPT), was not written by Shoal
            (FILE_FOREIGN), or was written by a newer release (FILE_NEWER); or the values from
            `given` differ from those that the checkpoint refers to (BASE_MODEL_DIFFERS).
    """
    content = read_manifest(path)
    try:
        info = CheckpointInfo(**content["info"])
        tensors = (
            read_shards(path, content)
            if content["layout"] == manifest.SHARDED
            else _read_parts(path, content["files"])
        )
        if KEY in content:
            frozen = content[KEY]
            tensors |= (
                given_values(path, frozen["tensors"], given(), needed)
                if frozen["mode"] == "reference"
                else read_shards(path, frozen)
            )
        return Checkpoint(
            info=info,
            state=unflatten(content["structure"], tensors),
            rows=SavedRows.of(path, content),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        # errors of torch and Python for invalid content
        raise damaged(path, f"its {manifest.NAME} is incomplete or invalid: {error!r}") from error


def rows_of(path: Path) -> SavedRows:
    """Returns the rows of sparse tables in one checkpoint (`.../step-<n>`). Checks that their files
    exist, but does not read them.

    Raises:
        CorruptDataError: as in `read_checkpoint`.
    """
    try:
        return SavedRows.of(path, read_manifest(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"its {manifest.NAME} is incomplete or invalid: {error!r}") from error


def read_model(
    path: Path,
    number: int | None = None,
    *,
    of_best: bool = False,
    average: int | None = None,
    base: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Returns the model's state from one checkpoint, or from the newest checkpoint in a directory.
    `number`: index among several models. `of_best`: True to read the best checkpoint of a directory
    instead of the newest. `average`: index of the averaged model to return instead of the model.
    `base`: values of the frozen parameters that the checkpoint only refers to.

    Raises:
        ConfigurationError: there is no checkpoint, it has several models and `number` selects none
            of them, or it has no such average.
        CorruptDataError: as in `read_checkpoint`, or the checkpoint has no model.
    """
    is_one = (path / manifest.NAME).is_file()
    found = path if is_one else best(path) if of_best else latest(path)
    if of_best and (is_one or (found is None and latest(path) is not None)):
        raise ConfigurationError(
            f"best=True: {path} is a single checkpoint; expected the directory passed to "
            "save_checkpoint"
            if is_one
            else f"best=True: no checkpoint of the newest run in {path} was saved with "
            "save_checkpoint(..., best=...)"
        )
    if found is None:
        raise ConfigurationError(
            f"there is no checkpoint in {path}; expected a directory passed to save_checkpoint, "
            "or a step-<n> in it"
        )
    structure = read_manifest(found).get("structure")
    several = isinstance(structure, dict) and "models" in structure
    where = ("models", number, "model") if several else ("model",)
    given = {join_path((*where, key)): value for key, value in base.items()}
    needed = join_path(where if average is None else ("registered",)) + "/"
    state = read_checkpoint(found, lambda: given, needed=needed).state
    states = state.get("models", [state]) if isinstance(state, dict) else []
    if not states or not all(
        isinstance(each, dict) and isinstance(each.get("model"), dict) for each in states
    ):
        raise damaged(found, "it contains no model")
    if average is not None:
        if number is not None:
            raise ConfigurationError(
                f"model={number!r} and average={average!r} were given; expected one of them, since "
                "the averages of all models are numbered together"
            )
        return _average(found, state, average, [each["model"].keys() for each in states])
    if number is None and len(states) == 1:
        number = 0
    if type(number) is not int or not 0 <= number < len(states):
        raise ConfigurationError(
            f"{found} has {len(states)} model{'s' if len(states) > 1 else ''}, but "
            f"model={number!r}; expected a number from 0 to {len(states) - 1}, in the order "
            "passed to as_distributed"
        )
    return dict(states[number]["model"])


def _average(
    path: Path, state: Mapping[str, Any], number: int, models: Sequence[Collection[str]]
) -> dict[str, torch.Tensor]:
    """Returns the state of averaged model `number` without its prefix. `models`: names of the
    tensors in the state of each model."""
    registered = state.get("registered")
    states = registered.get("states", {}) if isinstance(registered, Mapping) else {}
    averages = [
        each
        for each in states.values()
        if isinstance(each, Mapping)
        and _COUNT in each
        and len(each) > 1
        # apart from the count, all names of an AveragedModel have its prefix
        and all(name == _COUNT or str(name).startswith(_AVERAGED) for name in each)
    ]
    if type(number) is not int or not 0 <= number < len(averages):
        raise ConfigurationError(
            f"{path} has {len(averages)} averaged model{'' if len(averages) == 1 else 's'}, but "
            f"average={number!r}"
            + (f"; expected a number from 0 to {len(averages) - 1}" if averages else "")
            + ", in the order in which the script created torch's AveragedModels"
        )
    tensors = {
        name.removeprefix(_AVERAGED): tensor
        for name, tensor in averages[number].items()
        if name != _COUNT
    }
    # an average of a model returned by as_distributed has the prefix twice
    inner = {name.removeprefix(_AVERAGED): tensor for name, tensor in tensors.items()}
    return inner if any(set(names) == inner.keys() for names in models) else tensors


# ------------------------------------------------------------------------------------------ writing


def _by_part(snapshot: Snapshot, frozen: Frozen) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the tensors that are not frozen, for each top-level key, under the names that they
    have in that key's file."""
    if not isinstance(snapshot.structure, Mapping) or not all(
        _PART.fullmatch(key) for key in snapshot.structure
    ):
        raise ConfigurationError(
            "the keys of a checkpoint's state must be usable as file names (letters, digits, "
            "'_', '-', '.'), such as model and optimizer"
        )
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in snapshot.tensors.items():
        if name in frozen.tensors:
            continue
        part, slash, rest = name.partition("/")
        parts.setdefault(part, {})[_RESERVED.get(rest, rest) if slash else _WHOLE] = tensor
    return parts


def _fill(
    temporary: Path,
    snapshot: Snapshot,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    info: CheckpointInfo,
    rows: Mapping[str, Any],
    frozen: Frozen,
) -> None:
    files, once = {}, {}
    for part, tensors in parts.items():
        as_bytes = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in tensors.items()
            if tensor.dtype not in STORED_DTYPES
        }
        files[part] = write_tensors(temporary / f"{part}{SUFFIX}", tensors) | {"as_bytes": as_bytes}
    if frozen.written:
        pieces = {name: (0, snapshot.tensors[name].reshape(-1)) for name in frozen.written}
        name = frozen.file_name(0, 1)
        once[name] = write_pieces(temporary / f"{name}{SUFFIX}", pieces)
    write_manifest(
        temporary,
        info,
        manifest.WHOLE,
        files=files,
        structure=snapshot.structure,
        **({"rows": rows} if rows else {}),
        **frozen.entry(temporary, once),
    )


def _prune(directory: Path, written: Path, run: str, keep: int) -> None:
    """Removes checkpoints of a run that need not be kept. If a removal fails, the save still
    succeeds."""
    for path in superseded(_own(directory, run), written, keep):
        if (path / manifest.NAME).is_file():
            remove(path)


def superseded(
    newest_first: Sequence[tuple[Place, CheckpointInfo | None]], written: Place, keep: int
) -> list[Place]:
    """Returns the checkpoints of a run that need not be kept: all except the newest `keep`, the
    best one and `written`."""
    spared = written, best_of(newest_first)
    return [place for place, _ in newest_first[keep:] if place not in spared]


def _own(directory: Path, run: str) -> list[tuple[Path, CheckpointInfo | None]]:
    """Returns a run's checkpoints, newest first, each with its description, or None if the
    description cannot be read."""
    found = [(path, _info_of(path)) for _, path in sorted(_checkpoints(directory), reverse=True)]
    return [(path, info) for path, info in found if info is None or info.run in (run, "")]


def best_of(
    newest_first: Sequence[tuple[Place, CheckpointInfo | None]],
) -> Place | None:
    """Returns the checkpoint with the best metric (the earliest if several are equal), or None if
    no checkpoint has a metric. Considers only checkpoints with the same mode as the newest
    checkpoint that has a metric."""
    measured = [
        (path, info.metric, info.mode)
        for path, info in newest_first
        if info is not None and info.metric is not None
    ]
    if not measured:
        return None
    mode = measured[0][2]
    values = [(path, metric) for path, metric, of in reversed(measured) if of == mode]
    choose = max if mode == "max" else min
    return choose(values, key=lambda each: each[1])[0]


def _with_known_metric(directory: Path, info: CheckpointInfo) -> CheckpointInfo:
    """Returns `info`. If it has no metric and replaces a checkpoint that has one, adds that metric,
    because it was measured on the same state."""
    replaced = _info_of(directory / f"step-{info.step}")
    if info.metric is not None or replaced is None or replaced.run != info.run:
        return info
    return dataclasses.replace(info, metric=replaced.metric, mode=replaced.mode)


def _run_of(checkpoint: Path) -> str:
    """Returns the run of a checkpoint; empty if the checkpoint does not name a run."""
    info = _info_of(checkpoint)
    return "" if info is None else info.run


def _info_of(checkpoint: Path) -> CheckpointInfo | None:
    """Returns the description of a checkpoint; None if the description cannot be read."""
    try:
        return manifest.read_info(checkpoint)
    except CorruptDataError:
        return None


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    found = ((STEP.fullmatch(path.name), path) for path in directory.iterdir())
    return [(int(match[1]), path) for match, path in found if match is not None and path.is_dir()]


# ------------------------------------------------------------------------------------------ reading


def _read_parts(path: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for part, about in files.items():
        stored = read_tensors(path, part, about)
        for name, described in about["as_bytes"].items():
            stored[name] = (
                stored[name].view(getattr(torch, described["dtype"])).reshape(described["shape"])
            )
        tensors |= {name_in_state(part, name): tensor for name, tensor in stored.items()}
    return tensors


def name_in_state(part: str, name: str) -> str:
    """Returns the name of a tensor in the state, in the layout "whole". `part`: name of its file,
    without suffix. `name`: its name in the file."""
    return part if name == _WHOLE else f"{part}/{_ORIGINALS.get(name, name)}"
