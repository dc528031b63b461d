"""Frozen parameters in checkpoints: their values are written once, or not at all.

A parameter is frozen for a checkpoint if it did not require gradients when `as_distributed` was
called, and its values have not changed since the previous save. A script may write to such
parameters itself (a target network, a moving average), so each save compares digests of their
values.

    step-1200/
      checkpoint.json                                  under "frozen": dtype, shape and digest of
                                                       each frozen parameter
      frozen-3f0c...-00001-of-00003.safetensors        their values, in the format of `shards.py`

With `save_checkpoint(frozen="write")`, the default, the files are named by a digest of everything
in them. The next checkpoint with the same frozen values has hard links to the same files, or copies
if the file system has no links. Each checkpoint is therefore complete, and the disk space is freed
when the last of them is removed. With `frozen="reference"`, there are no such files: the reader of
the checkpoint must provide the values, and their digests must match.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import xxhash
from shoal_common.errors import CorruptDataError

from shoal_worker.checkpoint.manifest import (
    SUFFIX,
    file_of,
    read_manifest,
    sync_file,
)
from shoal_worker.state.digest import describe_values

FrozenMode = Literal["write", "reference"]
Described = Mapping[str, Any]
"""Dtype, shape and digest of a tensor, as returned by `describe_values`."""
Files = Mapping[str, Mapping[str, Any]]
"""The manifest's entry for each file, by the file's name without its suffix."""

KEY: Final = "frozen"
"""Key of the frozen parameters in a manifest."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The frozen parameters of one checkpoint, and how and where their values are stored."""

    mode: FrozenMode = "write"
    tensors: Mapping[str, Described] = field(default_factory=dict)
    """Descriptions of the frozen parameters, by their names in the state."""
    source: Path | None = None
    """An earlier checkpoint whose files contain the values; None if there is none."""

    @property
    def written(self) -> frozenset[str]:
        """Names of the tensors whose values this save writes into new files."""
        return frozenset(self.tensors if self.mode == "write" and self.source is None else ())

    def file_name(self, number: int, count: int) -> str:
        """Returns the name of a file, without its suffix. `number`: index of the file, from 0.
        `count`: number of files."""
        return f"frozen-{_identity(self.tensors)}-{number + 1:05d}-of-{count:05d}"

    def sent(self) -> bytes:
        """Serializes this object into a message to the other ranks."""
        source = None if self.source is None else str(self.source)
        return json.dumps([self.mode, self.tensors, source]).encode()

    @classmethod
    def received(cls, message: bytes) -> Frozen:
        """Restores the result of `sent`."""
        mode, tensors, source = json.loads(message)
        return cls(mode=mode, tensors=tensors, source=None if source is None else Path(source))

    def entry(self, temporary: Path, files: Files) -> dict[str, Any]:
        """Returns the manifest's entries for the frozen parameters. If an earlier checkpoint has
        the values, first links its files into the directory `temporary`. `files`: entries of the
        files that this save has written.

        Raises:
            OSError: the disk is full or failing.
            CorruptDataError: a file of the earlier checkpoint has been removed or truncated.
        """
        if not self.tensors:
            return {}
        if self.source is not None:
            files = read_manifest(self.source)[KEY]["files"]
            for name, about in files.items():
                link(file_of(self.source, name, about), temporary / f"{name}{SUFFIX}")
        return {KEY: {"mode": self.mode, "tensors": dict(self.tensors), "files": dict(files)}}


NOTHING: Final = Frozen()


class FrozenValues:
    """Decides at each save which parameters are frozen. Each `CheckpointSaver` has one instance."""

    def __init__(self) -> None:
        self._last: Mapping[str, Described] | None = None
        """Descriptions at the previous save; None before the first save."""
        self._changing: set[str] = set()
        """Names of parameters whose values have changed between two saves."""

    def state_replaced(self) -> None:
        """Records that a checkpoint has been loaded, so that the next save does not mistake the
        difference from the script's initial values for a change."""
        self._last = {}

    def decide(
        self,
        mode: FrozenMode,
        found: Mapping[str, Described],
        *,
        built: Mapping[str, Described],
        newest: Path | None,
    ) -> Frozen:
        """Returns the frozen parameters of the next checkpoint.

        Args:
            found: current descriptions of all parameters that may be frozen.
            built: descriptions of the values that the script created before training.
            newest: the newest checkpoint in the directory.
        """
        last = built if self._last is None else self._last
        self._changing |= {
            name for name, now in found.items() if name in last and last[name] != now
        }
        self._last = found
        if mode == "reference":
            kept = {name: now for name, now in found.items() if built.get(name) == now}
            return Frozen(mode=mode, tensors=kept)
        kept = {name: now for name, now in found.items() if name not in self._changing}
        return Frozen(mode=mode, tensors=kept, source=newest if _has(newest, kept) else None)


def given_values(
    path: Path,
    expected: Mapping[str, Described],
    given: Mapping[str, torch.Tensor],
    needed: str = "",
) -> dict[str, torch.Tensor]:
    """Returns copies of the frozen parameters' values that a checkpoint refers to but does not
    contain. `given`: the values that the caller provides. `needed`: prefix of the names to copy;
    the result has meta tensors for all other names.

    Raises:
        CorruptDataError (BASE_MODEL_DIFFERS): values are missing or differ.
    """
    values: dict[str, torch.Tensor] = {}
    for name, then in expected.items():
        if not name.startswith(needed):
            values[name] = torch.empty(then["shape"], device="meta")
            continue
        now = describe_values(given[name]) if name in given else None
        if now != then:
            found = "has no values of it" if now is None else f"has {_text(now)}"
            raise CorruptDataError(
                f'checkpoint {path} was saved with frozen="reference", without the values of '
                f"frozen parameter {name.partition('model/')[2]!r}: they are {_text(then)}, but "
                f"this process's model {found}; load the same base model before as_distributed "
                '(or pass it as base= to load_full_state), or save with frozen="write"',
                reason="BASE_MODEL_DIFFERS",
            )
        values[name] = given[name].detach().cpu().clone()
    return values


def _text(described: Described) -> str:
    return f"{described['dtype']} {described['shape']} with digest {described['digest']}"


def _identity(tensors: Mapping[str, Described]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tensors, sort_keys=True).encode())


def _has(checkpoint: Path | None, tensors: Mapping[str, Described]) -> bool:
    """Returns whether the files of `checkpoint` contain exactly these frozen values."""
    if checkpoint is None or not tensors:
        return False
    try:
        about = read_manifest(checkpoint).get(KEY, {})
        if about.get("tensors") != tensors or not about["files"]:
            return False
        for name, file in about["files"].items():
            file_of(checkpoint, name, file)
    except (CorruptDataError, KeyError, TypeError, AttributeError):
        return False
    return True


def link(source: Path, target: Path) -> None:
    """Makes `target` a hard link to the file `source`, or a copy if the file system has no links.
    Raises OSError."""
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    try:
        target.hardlink_to(source)
    except OSError:  # not supported, or too many links
        shutil.copyfile(source, target)
        sync_file(target)


def describe_all(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns the descriptions of those tensors in `names` that are in `tensors`."""
    return {name: describe_values(tensors[name]) for name in names if name in tensors}


Given = Callable[[], Mapping[str, torch.Tensor]]
"""Function that returns the caller's values of frozen parameters, by the tensors' names in the
state."""
