"""Whole checkpoints on disk: either there and complete or not there, and read only if every byte is as it was written.

One checkpoint is a directory:

    step-1200/
      checkpoint.json         what it is, the state's structure, and size and digest of each tensor file
      model.safetensors       the tensors under "model", by their path in it: for a model, the names in its state_dict()
      optimizer.safetensors   ... one such file per top-level entry of the state that holds tensors

It is made under a name that starts with a dot, flushed to the disk, and renamed into place. `layout` is "whole"; others (sharded files) are
for later, and are refused by name here. Nothing is pickled. When to save, and who, is not decided here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from shoal_common.errors import ConfigurationError, CorruptDataError, UnavailableError

from shoal_worker.checkpoint.directories import make_temporary, publish, remove, remove_leftovers, sync_directory, sync_file
from shoal_worker.state.snapshot import Snapshot
from shoal_worker.state.tree import unflatten

_FORMAT = "shoal-checkpoint"
_VERSION = 1
_LAYOUT = "whole"
_MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step-([0-9]+)")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WHOLE = "~whole"
"""Name in its file of a tensor that is itself a top-level entry. Names made by the state tree never hold "~w" or "~m"."""
_RESERVED = {"__metadata__": "~metadata"}
"""Names that safetensors keeps for itself."""
_READ_BLOCK = 8 << 20
_STORED_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
)
"""What every reader of safetensors understands; other dtypes are stored as their bytes."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says about itself."""

    step: int
    """Optimizer steps that the run had committed; it names the directory."""
    strategy: str
    world_size: int
    """Ranks at the time. A checkpoint loads into any number."""
    generation: int
    """The generation that saved it."""
    shoal_version: str = field(default_factory=lambda: version("shoal-worker"))
    """The release that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read whole and found undamaged."""

    info: CheckpointInfo
    state: Any
    """Its tensors are on the CPU and share memory with nothing."""


def write_checkpoint(directory: Path, snapshot: Snapshot, info: CheckpointInfo, *, fence: Callable[[], None], keep: int) -> Path:
    """Writes `directory/step-<n>` and returns its path. An older one of the same step is replaced; older steps but the newest `keep` are
    removed, after the new one is in place.

    Args:
        snapshot: of a mapping; its top-level keys name the tensor files.
        fence: called once all is on the disk, right before the rename; raises if this process may no longer publish.
        keep: >= 1; the one written here is never removed.

    Raises:
        ConfigurationError: `keep` below 1, a directory that cannot be made, or a top-level key that cannot be a file's name.
        UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is full or failing. As with anything the fence raises, what was there before
            is still there, and nothing new.
    """
    if keep < 1:
        raise ConfigurationError(f"keep={keep}: expected at least 1 checkpoint to be kept")
    parts = _by_part(snapshot)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = make_temporary(directory, f"step-{info.step}")
    except OSError as error:
        raise ConfigurationError(
            f"no checkpoint can be written to {directory}: {error}; choose a directory that this process may write"
        ) from error
    target = directory / f"step-{info.step}"
    try:
        with _disk_errors(target):
            _fill(temporary, snapshot, parts, info)
        fence()
        with _disk_errors(target):
            publish(temporary, target)
    finally:
        remove(temporary)  # gone already, or the one that was replaced
    _prune(directory, target, keep)
    return target


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`; None if there is none, or no such directory."""
    return max(_checkpoints(directory), default=(0, None), key=lambda found: found[0])[1]


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads one checkpoint (`.../step-<n>`) and verifies all of it.

    Raises:
        CorruptDataError: damaged (FILE_CORRUPT), not Shoal's (FILE_FOREIGN), or of a newer release (FILE_NEWER).
    """
    manifest = _read_manifest(path)
    tensors: dict[str, torch.Tensor] = {}
    try:
        info = CheckpointInfo(**manifest["info"])
        for name, about in manifest["files"].items():
            tensors |= _read_tensors(path, name, about)
        return Checkpoint(info=info, state=unflatten(manifest["structure"], tensors))
    except (KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, f"its {_MANIFEST} lacks something: {error!r}") from error


# ------------------------------------------------------------------------------------------------------------------ writing


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # the library reports a full disk as its own error
        raise UnavailableError(f"checkpoint {target} could not be written: {error}", reason="CHECKPOINT_NOT_WRITTEN") from error


def _by_part(snapshot: Snapshot) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each top-level key, by their name in its file."""
    if not isinstance(snapshot.structure, Mapping) or not all(_PART.fullmatch(key) for key in snapshot.structure):
        raise ConfigurationError(
            "a checkpoint's state must be a dict whose keys can name files (letters, digits, '_', '-', '.'), such as model and optimizer"
        )
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in snapshot.tensors.items():
        part, slash, rest = name.partition("/")
        parts.setdefault(part, {})[_RESERVED.get(rest, rest) if slash else _WHOLE] = tensor
    return parts


def _fill(temporary: Path, snapshot: Snapshot, parts: Mapping[str, Mapping[str, torch.Tensor]], info: CheckpointInfo) -> None:
    files = {}
    for part, tensors in parts.items():
        file = temporary / f"{part}.safetensors"
        safetensors.torch.save_file({name: _stored(tensor) for name, tensor in tensors.items()}, file)
        sync_file(file)
        as_bytes = {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in tensors.items()
            if tensor.dtype not in _STORED_DTYPES
        }
        files[part] = {"bytes": file.stat().st_size, "xxh3_64": _digest_of_file(file), "as_bytes": as_bytes}
    content = {"info": asdict(info), "layout": _LAYOUT, "files": files, "structure": snapshot.structure}
    document = {"format": _FORMAT, "version": _VERSION, "xxh3_64": _digest_of_json(content), **content}
    manifest = temporary / _MANIFEST
    manifest.write_text(json.dumps(document, indent=1, allow_nan=False), encoding="utf-8")
    sync_file(manifest)
    sync_directory(temporary)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _STORED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def _prune(directory: Path, written: Path, keep: int) -> None:
    """Removes what is no longer wanted. A failure here takes nothing from the checkpoint that was written."""
    newest_first = sorted(_checkpoints(directory), reverse=True)
    for _, path in newest_first[keep:]:
        if path != written and (path / _MANIFEST).is_file():
            remove(path)
    remove_leftovers(directory)


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir())
    return [(int(match[1]), path) for match, path in found if match is not None and path.is_dir()]


# ------------------------------------------------------------------------------------------------------------------ reading


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = path / _MANIFEST
    try:
        document = json.loads(manifest.read_bytes())
    except FileNotFoundError as error:
        raise CorruptDataError(f"{path} is no checkpoint of Shoal's: it has no {_MANIFEST}", reason="FILE_FOREIGN") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"its {_MANIFEST} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CorruptDataError(f"{path} is no checkpoint of Shoal's: its {_MANIFEST} does not say {_FORMAT!r}", reason="FILE_FOREIGN")
    if document.get("version") != _VERSION or document.get("layout") != _LAYOUT:
        raise CorruptDataError(
            f"checkpoint {path} has format version {document.get('version')!r} and layout {document.get('layout')!r}, of which this "
            f"release reads {_VERSION} and {_LAYOUT!r}; load it with the release that wrote it, {_release(document)}",
            reason="FILE_NEWER",
        )
    content = {key: document.get(key) for key in ("info", "layout", "files", "structure")}
    if document.get("xxh3_64") != _digest_of_json(content):
        raise _corrupt(path, f"its {_MANIFEST} does not match its digest")
    return content


def _release(document: Mapping[str, Any]) -> str:
    info = document.get("info")
    return str(info.get("shoal_version", "unknown")) if isinstance(info, dict) else "unknown"


def _read_tensors(path: Path, part: str, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if "/" in part:
        raise _corrupt(path, f"its {_MANIFEST} names a file {part!r} elsewhere")
    file = path / f"{part}.safetensors"
    try:
        size = file.stat().st_size
        if size != about["bytes"]:
            raise _corrupt(path, f"{file.name} has {size} bytes, {about['bytes']} were written")
        if _digest_of_file(file) != about["xxh3_64"]:
            raise _corrupt(path, f"{file.name} does not match its digest")
        # Copied: the library maps the file, and a mapping must not outlive it.
        stored = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise _corrupt(path, f"{file.name} cannot be read: {error}") from error
    for name, described in about["as_bytes"].items():
        stored[name] = stored[name].view(getattr(torch, described["dtype"])).reshape(described["shape"])
    originals = {stand_in: name for name, stand_in in _RESERVED.items()}
    return {part if name == _WHOLE else f"{part}/{originals.get(name, name)}": tensor for name, tensor in stored.items()}


def _digest_of_file(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while block := opened.read(_READ_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _digest_of_json(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _corrupt(path: Path, what: str) -> CorruptDataError:
    return CorruptDataError(f"checkpoint {path} is damaged: {what}; use an older one, or a copy", reason="FILE_CORRUPT")
