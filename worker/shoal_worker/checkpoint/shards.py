"""Sharded checkpoints: each rank writes its own part, and no rank gathers the complete state.

    step-1200/
      checkpoint.json                    as in the layout "whole", and dtype and shape of each
                                         tensor
      shard-00001-of-00003.safetensors   runs of flattened tensors; the manifest lists their
                                         elements
      ...

The first shard also contains the data that is the same on all ranks. The files use
torch.distributed.checkpoint's safetensors format (with each tensor's offset in the header), so
torch's `HuggingFaceStorageReader` can read them too, as flattened tensors.

The first rank creates a temporary directory. Every rank writes its file there, followed by a note
with the file's size, digest and content. A note may also explain why a shard will not be written.
When all notes are present and the shards cover every tensor, the first rank writes
`checkpoint.json`, which marks the checkpoint as complete, and publishes the directory (`files.py`).
All of this runs on the ranks' checkpoint threads, which communicate only through the file system,
so training is not delayed.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from shoal_common.errors import UnavailableError
from shoal_common.failpoints import failpoint

from shoal_worker.checkpoint.frozen import NOTHING, Frozen
from shoal_worker.checkpoint.manifest import (
    SUFFIX,
    damaged,
    file_of,
    opened,
    write_tensors,
)
from shoal_worker.state.device_reader import HostCopies, keep_fitting
from shoal_worker.state.digest import describe_values, part_digest
from shoal_worker.state.serial import STORED_DTYPES, stored
from shoal_worker.state.tree import Json, StatePart, flatten

_log = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=30)
"""Maximum time that the first rank waits for the other ranks' shards."""
_POLL = timedelta(milliseconds=20)
_ASK_GONE = timedelta(seconds=0.5)
"""Interval between the first rank's checks whether a rank has left the job."""
_DCP_KEY, _DCP_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Metadata keys that torch.distributed.checkpoint uses for a tensor's offset
(torch/distributed/checkpoint/_hf_utils.py)."""

Span = tuple[int, int]
"""Contiguous range of a stored tensor's elements: index of the first element, and number of
elements."""
Pieces = Mapping[str, tuple[int, torch.Tensor]]
"""Tensor name -> contiguous range of its elements: index of the first element, and the elements,
flat."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One rank's part of a state, copied to host memory, and the shards in which the rank writes
    it."""

    structure: Json
    outline: Mapping[str, torch.Tensor]
    """All tensors of the complete state, on the meta device."""
    count: int
    mine: Mapping[int, Pieces]
    """Copies of the data that this rank writes, by shard number. Their values are valid once
    `copies` have finished."""
    copies: HostCopies
    frozen: Frozen = NOTHING
    """The frozen parameters, which are not part of the shards."""

    @classmethod
    def take(
        cls,
        part: StatePart,
        frozen: Frozen = NOTHING,
        *,
        memory: dict[str, torch.Tensor] | None = None,
    ) -> Shards:
        """Copies the data that this rank writes. The state may be changed as soon as this method
        returns, even if copies from a device are still in progress. `frozen`: the frozen parameters
        of the state. `memory`: `host_tensors` of earlier shards that are no longer needed. The call
        empties this dict, and reuses or frees the memory.

        Raises:
            ConfigurationError (STATE_UNSUPPORTED): the state contains an unsupported value.
        """
        structure, tensors = flatten(part.state, outlines=True)
        copies = HostCopies()
        needed = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in frozen.tensors or name in frozen.written
        }
        pieces = {number: _pieces(needed, part, number) for number in part.shards}
        wanted = {
            _key(number, name): values
            for number, own in pieces.items()
            for name, (_, values) in own.items()
        }
        memory = keep_fitting({} if memory is None else memory, wanted)
        mine = {
            number: {
                name: (begin, copies.of(values, memory.pop(_key(number, name), None)).reshape(-1))
                for name, (begin, values) in own.items()
            }
            for number, own in pieces.items()
        }
        copies.begun()
        outline = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()
        }
        return cls(
            structure=structure,
            outline=outline,
            count=part.count,
            mine=mine,
            copies=copies,
            frozen=frozen,
        )

    @property
    def host_tensors(self) -> dict[str, torch.Tensor]:
        """The host copies, by a key made of shard number and tensor name. A later `take` can reuse
        their memory."""
        return {
            _key(number, name): values
            for number, pieces in self.mine.items()
            for name, (_, values) in pieces.items()
        }

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns the dtype and shape of every tensor that is not frozen, for the manifest."""
        return {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in self.outline.items()
            if name not in self.frozen.tensors
        }

    def write(self, temporary: Path) -> None:
        """Writes this rank's shards. After each of them, writes a note, a small file that tells the
        first rank that the shard is complete.

        Raises:
            OSError: the disk is full or failing.
            RuntimeError: copying from a device has failed.
        """
        self.copies.arrive()
        written = self.frozen.written
        for number, pieces in self.mine.items():
            own = {name: piece for name, piece in pieces.items() if name not in written}
            about = write_pieces(temporary / f"{self._name(number)}{SUFFIX}", own)
            failpoint("checkpoint.shard_written")
            frozen = {}
            if once := {name: piece for name, piece in pieces.items() if name in written}:
                file = self.frozen.file_name(number, self.count)
                frozen = {file: write_pieces(temporary / f"{file}{SUFFIX}", once)}
            self._note(temporary, number, {"shard": about, "frozen": frozen})

    def write_aside(self, temporary: Path) -> None:
        """Runs `write` on a rank other than the one that completes the checkpoint. If `write`
        fails, leaves a note for that rank, which would otherwise wait for the shard.

        Raises:
            UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is full or failing.
            Exception: any other error.
        """
        try:
            self.write(temporary)
        except Exception as error:
            # an error of any kind, because without a note the first rank would wait for this shard
            # until its deadline
            failed_at = time.time()
            try:
                for number in self.mine:
                    self._note_failure(temporary, number, f"{type(error).__name__}: {error}")
            except FileNotFoundError:
                _log.info(
                    "the save of %s was abandoned, so this rank's part was discarded", temporary
                )
                return
            except OSError as unsaid:
                _log.error(
                    "could not tell rank 0 that a part of %s is missing; rank 0 will wait up to "
                    "%s for it: %s",
                    temporary,
                    _TIMEOUT,
                    unsaid,
                )
            if isinstance(error, OSError):
                failure = _not_written(temporary, f"writing this rank's part failed: {error}")
                failure.failed_at = failed_at  # before the first rank could read the note
                raise failure from error
            raise

    def collect(
        self, temporary: Path, *, gone: Callable[[int], bool]
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Waits for all ranks' shards. Returns the manifest's entries for the shards and for the
        new files with frozen values, by file name. Returns None if a rank left without writing its
        shard.

        Raises:
            UnavailableError (CHECKPOINT_NOT_WRITTEN): a rank could not write, or is too slow.
            OSError: the directory cannot be read.
        """
        give_up_at = time.monotonic() + _TIMEOUT.total_seconds()
        ask_at = 0.0
        notes: dict[int, dict[str, Any]] = {}
        while True:
            missing = [number for number in range(self.count) if number not in notes]
            notes |= {
                number: note
                for number in missing
                if (note := self._read_note(temporary, number)) is not None
            }
            for number, note in notes.items():
                if "error" in note:
                    raise _not_written(
                        temporary, f"writing shard {number + 1} failed: {note['error']}"
                    )
            if len(notes) == self.count:
                return self._complete(temporary, notes)
            if time.monotonic() >= ask_at:
                if any(
                    gone(number) and self._read_note(temporary, number) is None
                    for number in missing
                    if number not in notes
                ):
                    _log.warning(
                        "writing %s was abandoned: a rank was lost before it had written its part",
                        temporary,
                    )
                    return None
                ask_at = time.monotonic() + _ASK_GONE.total_seconds()
            if time.monotonic() > give_up_at:
                raise _not_written(
                    temporary,
                    f"{self.count - len(notes)} shards were not written within {_TIMEOUT}; is the "
                    "disk too slow?",
                )
            time.sleep(_POLL.total_seconds())

    def _complete(
        self, temporary: Path, notes: Mapping[int, dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        files = {self._name(number): notes[number]["shard"] for number in sorted(notes)}
        frozen = {
            file: about
            for number in sorted(notes)
            for file, about in notes[number]["frozen"].items()
        }
        sizes = _stored_sizes(self.outline)
        own = {name: size for name, size in sizes.items() if name not in self.frozen.tensors}
        once = {name: size for name, size in sizes.items() if name in self.frozen.written}
        differing = _not_covered(own, files.values()) or _not_covered(once, frozen.values())
        if differing is not None:
            raise _not_written(
                temporary,
                f"the ranks' parts do not add up to tensor {differing!r}; did the ranks register "
                "different state?",
            )
        for number in notes:
            self._note_path(temporary, number).unlink()
        return files, frozen

    def _name(self, number: int) -> str:
        return f"shard-{number + 1:05d}-of-{self.count:05d}"

    def _note_path(self, temporary: Path, number: int) -> Path:
        return temporary / f"{self._name(number)}.json"

    def _note(self, temporary: Path, number: int, note: Mapping[str, Any]) -> None:
        path = self._note_path(temporary, number)
        being_written = path.with_suffix(".part")
        being_written.write_text(json.dumps(note), encoding="utf-8")
        being_written.replace(path)

    def _note_failure(self, temporary: Path, number: int, error: str) -> None:
        """Writes a note that a shard will be missing. If the disk is too full for the error's text,
        the note is an empty file."""
        try:
            self._note(temporary, number, {"error": error})
        except OSError:
            self._note_path(temporary, number).touch()

    def _read_note(self, temporary: Path, number: int) -> dict[str, Any] | None:
        try:
            written = self._note_path(temporary, number).read_bytes()
        except FileNotFoundError:
            return None
        note: dict[str, Any] = json.loads(written or b'{"error": "its disk is full or failing"}')
        return note


def _key(number: int, name: str) -> str:
    return f"{number}/{name}"


def read_shards(path: Path, content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the full tensors of a sharded checkpoint, by name. `content`: the manifest, or its
    entry for frozen parameters; both have the keys "tensors" and "files".

    Raises:
        CorruptDataError: a file is damaged or missing, or the shards do not cover the tensors.
        KeyError, TypeError, AttributeError, ValueError, RuntimeError: the manifest is incomplete or
            invalid.
    """
    outline = outline_of(path, content)
    sizes = _stored_sizes(outline)
    flat = {
        name: torch.empty(
            size, dtype=outline[name].dtype if width(outline[name].dtype) == 1 else torch.uint8
        )
        for name, size in sizes.items()
    }
    for file, about in content["files"].items():
        with opened(path, file, about) as content_of:
            for name, begin, run in runs_in(path, file, about, content_of):
                flat[name][begin : begin + len(run)] = run
    return {
        name: flat[name].view(tensor.dtype).view(tensor.shape) for name, tensor in outline.items()
    }


def outline_of(path: Path, content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a sharded checkpoint on the meta device, by name, after checking that
    the files are large enough for them. Arguments and errors are those of `read_shards`."""
    outline = {
        name: torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device="meta")
        for name, about in content["tensors"].items()
    }
    sizes = _stored_sizes(outline)
    differing = _not_covered(sizes, content["files"].values())
    if differing is not None:
        raise damaged(path, f"its shards do not add up to tensor {differing!r}")
    for file, about in content["files"].items():
        # before allocating all the memory that the manifest requires
        claimed = sum(
            length * outline[name].dtype.itemsize // width(outline[name].dtype)
            for name, (_, length) in about["spans"].items()
        )
        if claimed > file_of(path, file, about).stat().st_size:
            raise damaged(
                path, f"{file} is smaller than the {claimed} bytes that the manifest lists for it"
            )
    return outline


def runs_in(
    path: Path, file: str, about: Mapping[str, Any], content: Any
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields the ranges of stored elements in an opened file: tensor name, index of the first
    element, and the elements, flat. They share memory with the file. `about`: the file's manifest
    entry. `content`: result of `opened`.

    Raises:
        CorruptDataError: a range is missing or has another length.
    """
    names = set(content.keys())
    for name, (begin, length) in about["spans"].items():
        run = content.get_tensor(name) if name in names else None
        if run is None or run.numel() != length:
            raise damaged(path, f"{file} does not contain {name!r} as the manifest describes it")
        yield name, begin, run.reshape(-1)


def describe_sums(
    part: StatePart, names: Iterable[str], sums: Iterable[Mapping[str, int]]
) -> dict[str, dict[str, Any]]:
    """Returns the descriptions (dtype, shape and digest) of those tensors in `names` that are in
    the state. `sums`: the results of `own_sums` on all ranks."""
    _, tensors = flatten(part.state, outlines=True)
    everyones = list(sums)
    return {
        name: describe_values(tensors[name], sum(each.get(name, 0) for each in everyones))
        for name in names
        if name in tensors
    }


def own_sums(part: StatePart, names: Collection[str]) -> dict[str, int]:
    """Returns, for each tensor in `names`, the sum of `part_digest` over the elements that this
    rank writes."""
    _, tensors = flatten(part.state, outlines=True)
    named = {name: tensor for name, tensor in tensors.items() if name in names}
    sums: dict[str, int] = {}
    for number in part.shards:
        for name, (begin, values) in _pieces(named, part, number).items():
            sums[name] = sums.get(name, 0) + part_digest(values, begin)
    return sums


def write_pieces(file: Path, pieces: Pieces) -> dict[str, Any]:
    """Writes contiguous ranges of flattened tensors to a file, and returns the file's manifest
    entry. Raises OSError."""
    tensors = {name: stored(values) for name, (_, values) in pieces.items()}
    spans = {
        name: (begin * width(values.dtype), tensors[name].numel())
        for name, (begin, values) in pieces.items()
    }
    offsets = {name: {_DCP_OFFSETS: [begin]} for name, (begin, _) in spans.items()}
    return write_tensors(file, tensors, {_DCP_KEY: json.dumps(offsets)}) | {"spans": spans}


def _pieces(
    tensors: Mapping[str, torch.Tensor], part: StatePart, number: int
) -> dict[str, tuple[int, torch.Tensor]]:
    """Returns the tensors' elements that belong to a shard, without copying. The elements of a
    sharded tensor are a view of this rank's part. All other tensors belong to the first shard."""
    views: dict[int, list[tuple[str, torch.Tensor]]] = {}
    pieces: dict[str, tuple[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            views.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
        elif number == 0:
            pieces[name] = (0, tensor)
    for run in part.shards[number]:
        for name, view in views.get(run.vector.untyped_storage()._cdata, ()):
            lies = int(view.storage_offset())
            first, last = (
                max(lies, run.begin),
                min(lies + view.numel(), run.begin + run.values.numel()),
            )
            if first < last:
                pieces[name] = first - lies, run.values[first - run.begin : last - run.begin]
    return pieces


def width(dtype: torch.dtype) -> int:
    """Returns how many stored elements represent one element of a tensor with this dtype."""
    return 1 if dtype in STORED_DTYPES else dtype.itemsize


def _stored_sizes(outline: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: math.prod(tensor.shape) * width(tensor.dtype) for name, tensor in outline.items()}


def _not_covered(sizes: Mapping[str, int], files: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns the name of a tensor with an element that is in no file or in several files; None if
    there is no such tensor."""
    spans: dict[str, list[Span]] = {name: [] for name in sizes}
    name: str
    for about in files:
        for name, (begin, length) in about["spans"].items():
            if name not in spans:
                return name
            spans[name].append((begin, length))
    for name, found in spans.items():
        end = 0
        for begin, length in sorted(found):
            if begin != end or length < 0:
                return name
            end += length
        if end != sizes[name]:
            return name
    return None


def _not_written(temporary: Path, why: str) -> UnavailableError:
    return UnavailableError(
        f"checkpoint {temporary} could not be written: {why}", reason="CHECKPOINT_NOT_WRITTEN"
    )
