"""Compares the tensors of two checkpoints, or of files with a state dict, for `shoal compare`.

Files are mapped into memory and compared in blocks, so that neither model is loaded as a whole. The
layout of a checkpoint, its strategy and its number of ranks do not matter. Values other than
tensors, such as settings and counters, are not compared. Nothing is unpickled except tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.files import latest, name_in_state
from shoal_worker.checkpoint.frozen import KEY
from shoal_worker.checkpoint.manifest import SUFFIX, damaged, opened, read_manifest
from shoal_worker.checkpoint.shards import outline_of, runs_in, width
from shoal_worker.state.digest import describe_values, part_digest
from shoal_worker.state.serial import AS_BYTES, METADATA, stored
from shoal_worker.state.tree import check_carried, join_path, tensor_names

_BLOCK: Final = 1 << 22
"""Number of elements that are compared at a time."""
_MODEL: Final = "model/"
"""Prefix of the paths of a model's tensors. A file with a state dict has only these."""
_EXPECTED: Final = "expected a state dict, or a dict with one under 'model'"
_SHOWN: Final = 3
"""Number of names that are shown of a longer list."""


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in one or several opened files."""

    outline: torch.Tensor
    """The tensor on the meta device."""
    runs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Contiguous ranges of its stored elements: index of the first, and the elements, flat. Empty
    if only `description` is stored."""
    description: Mapping[str, Any] | None = None
    """Dtype, shape and digest (`describe_values`), if the file refers to values that it does not
    contain."""

    def block(self, begin: int, end: int) -> torch.Tensor:
        """Returns the elements from `begin` to `end` (exclusive), flat."""
        dtype = self.outline.dtype
        times = width(dtype)
        begin, end = begin * times, end * times
        found = [
            run[max(begin, lies) - lies : end - lies]
            for lies, run in self.runs
            if lies < end and begin < lies + len(run)
        ]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole if whole.dtype == dtype else whole.clone().view(dtype)

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the tensor in blocks: index of the first element, and the elements, flat."""
        count = self.outline.numel()
        for begin in range(0, count, _BLOCK):
            yield begin, self.block(begin, min(begin + _BLOCK, count))

    def described(self) -> Mapping[str, Any]:
        """Returns `description`, computed from the values if they are stored."""
        if self.description is not None:
            return self.description
        digest = sum(part_digest(block, begin) for begin, block in self.blocks())
        return describe_values(self.outline, digest)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Tensors of an opened checkpoint or file."""

    place: str
    """Path, for messages."""
    tensors: Mapping[str, Stored]
    """The tensors by their path in the state."""
    is_checkpoint: bool = False
    tables: Sequence[str] = ()
    """Names of sparse tables, whose rows are not among the tensors."""


def open_tensors(path: Path, closing: ExitStack) -> Opened:
    """Opens a checkpoint, the newest checkpoint in a directory, or a file with a state dict. The
    file may be named by its directory, if that contains one safetensors file, as save_pretrained
    writes it. The tensors are valid until `closing` is closed.

    Raises:
        ConfigurationError: there is no such checkpoint or file, or a file has no state dict.
        CorruptDataError: as in `read_checkpoint`.
    """
    checkpoint = path if (path / manifest.NAME).is_file() else latest(path)
    if checkpoint is not None:
        return _open_checkpoint(checkpoint, closing)
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        raise ConfigurationError(
            f"there is no checkpoint or file {path}; expected a directory passed to "
            "save_checkpoint, a step-<n> in it, a file with a state dict, or a directory with one "
            f"{SUFFIX} file"
        )
    (path,) = files
    found = _open_safetensors(path, closing) if path.suffix == SUFFIX else _open_torch(path)
    return Opened(
        place=str(path), tensors={f"{_MODEL}{name}": each for name, each in found.items()}
    )


def _open_checkpoint(path: Path, closing: ExitStack) -> Opened:
    content = read_manifest(path)
    try:
        found: dict[str, Stored] = {}
        if content["layout"] == manifest.SHARDED:
            found |= _open_shards(path, content, closing)
        else:
            for part, about in content["files"].items():
                file = closing.enter_context(opened(path, part, about))
                for name, each in _in_file(file, about["as_bytes"]).items():
                    found[name_in_state(part, name)] = each
        frozen = content.get(KEY)
        if frozen is not None and frozen["mode"] == "reference":
            found |= {
                name: Stored(outline=_outline(about["dtype"], about["shape"]), description=about)
                for name, about in frozen["tensors"].items()
            }
        elif frozen is not None:
            found |= _open_shards(path, frozen, closing)
        # an average has the prefix "module." twice if its rank had the complete model
        tensors = {
            where.replace("/module.module.", "/module."): found[name]
            for where, name in tensor_names(content["structure"]).items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        # errors of torch and Python for invalid content
        raise damaged(path, f"its {manifest.NAME} is incomplete or invalid: {error!r}") from error
    return Opened(
        place=str(path), tensors=tensors, is_checkpoint=True, tables=sorted(content.get("rows", {}))
    )


def _open_shards(path: Path, content: Mapping[str, Any], closing: ExitStack) -> dict[str, Stored]:
    found = {name: Stored(outline=each) for name, each in outline_of(path, content).items()}
    for file, about in content["files"].items():
        content_of = closing.enter_context(opened(path, file, about))
        for name, begin, run in runs_in(path, file, about, content_of):
            found[name].runs.append((begin, run))
    for each in found.values():
        each.runs.sort(key=lambda run: run[0])
    return found


def _open_safetensors(path: Path, closing: ExitStack) -> dict[str, Stored]:
    """Returns the tensors of a file by their path in the model's state."""
    try:
        file = closing.enter_context(safetensors.safe_open(path, framework="pt"))
        own = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        as_bytes = own.get(AS_BYTES, {})
        described = {
            name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in as_bytes.items()
        }
        found = _in_file(file, described)
        if "structure" not in own:
            return {join_path((name,)): each for name, each in found.items()}
        return {where: found[name] for where, name in tensor_names(own["structure"]).items()}
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{path} is not a safetensors file: {error}") from error


def _open_torch(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file by their path in the model's state."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # of many kinds, because torch reads several formats
        raise ConfigurationError(
            f"{path} cannot be read as a file written by torch.save ({type(error).__name__}); "
            f"{_EXPECTED}"
        ) from error
    within = found.get("model") if isinstance(found, Mapping) else None
    state = within if isinstance(within, Mapping) else found
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"{path} contains a {type(found).__name__}; {_EXPECTED}")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"{path} contains {name!r}, which is a {type(value).__name__}; {_EXPECTED}"
            )
        check_carried(value, str(name))
    return {
        join_path((name,)): Stored(
            outline=torch.empty_like(value, device="meta"),
            runs=[(0, _as_stored(value.detach().contiguous()))],
        )
        for name, value in state.items()
    }


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor in the form of `Stored.runs`."""
    return stored(tensor).reshape(-1)


def _in_file(file: Any, as_bytes: Mapping[str, Mapping[str, Any]]) -> dict[str, Stored]:
    """Returns the tensors of an opened safetensors file. `as_bytes`: dtype and shape of those that
    are stored as bytes."""
    found = {}
    for name in file.keys():  # noqa: SIM118 - not a Mapping
        tensor = file.get_tensor(name)
        about = as_bytes.get(name)
        outline = (
            torch.empty_like(tensor, device="meta")
            if about is None
            else _outline(about["dtype"], about["shape"])
        )
        found[name] = Stored(outline=outline, runs=[(0, _as_stored(tensor))])
    return found


def _outline(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


# ---------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two tensors whose bits differ."""

    largest: float = math.nan
    """Largest absolute difference of two elements; infinite if only one of them is NaN. NaN if the
    values cannot be compared: dtypes or shapes differ, or a checkpoint only refers to the
    values."""
    relative: float = math.nan
    """`largest`, divided by the largest absolute value in either tensor."""
    why: str = ""
    """Text that explains why the values cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing the tensors of two places."""

    places: tuple[str, str]
    compared: Sequence[str]
    """Paths of the tensors in both places."""
    differing: Mapping[str, Difference]
    """The tensors whose bits differ."""
    only: tuple[Sequence[str], Sequence[str]]
    """Paths of the tensors that only the first place has, and that only the second has."""
    tables: Sequence[str] = ()
    """Sparse tables, whose rows were not compared."""

    @property
    def equal(self) -> bool:
        """True if both places have the same tensors with the same bits."""
        return not self.differing and not any(self.only)

    def __str__(self) -> str:
        one, other = self.places
        lines = []
        if self.equal:
            count = len(self.compared)
            lines.append(
                f"{one} and {other} have the same {count} tensor{'' if count == 1 else 's'}, bit "
                "for bit"
            )
        else:
            lines.append(f"{one} and {other} differ")
            lines += self._parts()
        for place, names in zip(self.places, self.only, strict=True):
            if names:
                lines.append(f"  only in {place}: {_listed(names)}")
        if self.tables:
            lines.append(f"rows of sparse tables were not compared: {_listed(self.tables)}")
        return "\n".join(lines)

    def _parts(self) -> Iterator[str]:
        """Yields one line for each top-level entry of the state, and one for each tensor whose
        values cannot be compared."""
        parts: dict[str, list[str]] = {}
        for path in self.compared:
            parts.setdefault(path.partition("/")[0], []).append(path)
        for part, paths in parts.items():
            apart = {path: self.differing[path] for path in paths if path in self.differing}
            line = f"  {part}: {len(apart)} of {len(paths)} tensors differ"
            measured = {path: each for path, each in apart.items() if not each.why}
            if measured:
                largest = max(measured, key=lambda path: measured[path].largest)
                relative = max(measured, key=lambda path: measured[path].relative)
                line += (
                    f"; largest difference {measured[largest].largest:.3g} in "
                    f"{_short(largest)!r}, largest relative difference "
                    f"{measured[relative].relative:.3g} in {_short(relative)!r}"
                )
            yield line
            for path, each in apart.items():
                if each.why:
                    yield f"  {path}: {each.why}"


def compare(one: Opened, other: Opened) -> Comparison:
    """Compares the tensors of two places bit by bit. If one of them is a file with a state dict,
    compares only the model.

    Raises:
        ConfigurationError: one place is such a file, and the other has no model or several.
    """
    tensors = [each.tensors for each in (one, other)]
    if one.is_checkpoint != other.is_checkpoint:
        tensors = [
            {path: each for path, each in found.items() if path.startswith(_MODEL)}
            for found in tensors
        ]
        if not all(tensors):
            lacking = one if one.is_checkpoint else other
            raise ConfigurationError(
                f"{lacking.place} has several models, or none, and cannot be compared with a file "
                "that has one model; compare two checkpoints"
            )
    mine, theirs = tensors
    compared = [path for path in mine if path in theirs]
    found = {path: _difference(mine[path], theirs[path]) for path in compared}
    return Comparison(
        places=(one.place, other.place),
        compared=compared,
        differing={path: each for path, each in found.items() if each is not None},
        only=([path for path in mine if path not in theirs], [p for p in theirs if p not in mine]),
        tables=sorted({*one.tables, *other.tables}),
    )


def _difference(one: Stored, other: Stored) -> Difference | None:
    """Returns the difference between two tensors; None if their bits are equal."""
    kinds = [f"{str(each.outline.dtype)[6:]} {list(each.outline.shape)}" for each in (one, other)]
    if kinds[0] != kinds[1]:
        return Difference(why=f"{kinds[0]} and {kinds[1]}")
    if one.description is not None or other.description is not None:
        if one.described() == other.described():
            return None
        return Difference(why="different values, which a checkpoint refers to without storing them")
    if all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for (_, mine), (_, theirs) in zip(one.blocks(), other.blocks(), strict=True)
    ):
        return None
    largest = magnitude = 0.0
    for blocks in zip(one.blocks(), other.blocks(), strict=True):
        mine, theirs = (
            block.to(torch.complex128 if block.is_complex() else torch.float64)
            for _, block in blocks
        )
        apart = (mine - theirs).abs()
        # equal infinities, and NaNs on both sides, do not differ
        apart[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0
        largest = max(largest, float(apart.nan_to_num(nan=math.inf).max()))
        magnitude = max(magnitude, _largest(mine), _largest(theirs))
    relative = largest / magnitude if magnitude and largest < math.inf else largest
    return Difference(largest=largest, relative=relative)


def _largest(values: torch.Tensor) -> float:
    """Returns the largest finite magnitude."""
    return float(values.abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _short(path: str) -> str:
    return path.partition("/")[2] or path


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
