"""Snapshot on disk: a safetensors file, which any safetensors tool can open. It is written under a
temporary name, synced, and renamed.

Tensors are named `PARTITION:values`, `PARTITION:state:RUN:NAME` and, for earlier values that delay
compensation needs, `PARTITION:base:VERSION`. A bucket of a table has `PARTITION:rows:ids`,
`PARTITION:rows:values`, `PARTITION:rows:updated_at` and `PARTITION:rows:state:NAME`. Names of
partitions handed over by another server start with `taken:` or `coming:`. The metadata lists the
pieces of each run. It has three entries: `format` identifies the file, `shoal` is the JSON of
image.py with each tensor's xxh3-64, and `xxh3` is the xxh3-64 of that JSON.

This module writes the file itself, because the library's writer would copy everything in memory.
Files are read with the library, whose parser is strict.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from shoal_common.errors import CorruptDataError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_common.formats.wire import checksum
from shoal_common.tables.rows import Rows, RowsImage

from shoal_ps_server.shard.layout import Bucket, PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.payload import bytes_of
from shoal_ps_server.shard.run_optimizer import RunImage
from shoal_ps_server.storage.image import (
    FORMAT_VERSION,
    ServerImage,
    dumps,
    spec_from_json,
    spec_to_json,
    state_from_json,
    state_to_json,
)
from shoal_ps_server.storage.moves import Taken

FORMAT: Final = "shoal-ps-server-snapshot"
_OLDEST_READABLE: Final = 4
_TAKEN: Final = "taken:"
_COMING: Final = "coming:"

_SAFETENSORS_NAMES: Final = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_DTYPES: Final = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def write_snapshot(path: Path, image: ServerImage) -> int:
    """Replaces `path` atomically with a snapshot of `image`, and returns its size in bytes. After
    an OSError the old file is intact, and no temporary file is left."""
    tensors = {
        name: tensor for partition in image.partitions for name, tensor in _named(partition).items()
    }
    for prefix, taken in ((_TAKEN, image.taken), (_COMING, image.coming)):
        if taken is not None:
            tensors |= {
                name: tensor
                for each in taken.images.values()
                for name, tensor in _named(each, prefix).items()
            }
    header = _header(tensors, _metadata(image))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for tensor in tensors.values():
                file.write(bytes_of(tensor))
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        failpoint("snapshot.written")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)
    failpoint("snapshot.renamed")
    return size


def read_snapshot(path: Path) -> ServerImage | None:
    """Returns the image stored in a snapshot; None if the file does not exist.

    Raises CorruptDataError: SNAPSHOT_CORRUPT (truncated, changed, unreadable), SNAPSHOT_FOREIGN
    (another program's file), SNAPSHOT_NEWER and SNAPSHOT_OLDER (a different release's file).
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _checked_metadata(path, file.metadata() or {})
            state = state_from_json(metadata["state"])
            optimizer = None if state.configuration is None else state.configuration.optimizer
            specs = state.layout.partitions

            def read(name: str) -> torch.Tensor:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.clone()

            partitions = tuple(
                _partition(read, specs[entry["partition_id"]], optimizer, entry)
                for entry in metadata["partitions"]
            )
            named = {name for partition in partitions for name in _named(partition)}
            handed_over = {}
            for prefix in (_TAKEN, _COMING):
                handed_over[prefix] = _taken_from(read, prefix, metadata.get(prefix), optimizer)
                if (taken := handed_over[prefix]) is not None:
                    named |= {
                        name for each in taken.images.values() for name in _named(each, prefix)
                    }
            if extra := set(file.keys()) - named:
                raise ValueError(
                    "it has tensors that its metadata does not name: "
                    f"{', '.join(sorted(extra)[:5])}"
                )
    except CorruptDataError:
        raise
    except (
        SafetensorError,
        OSError,
        ShoalError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        raise CorruptDataError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore a copy of the whole "
            "data directory, or remove it to start without values",
            reason="SNAPSHOT_CORRUPT",
        ) from error
    return ServerImage(
        state=state, partitions=partitions, taken=handed_over[_TAKEN], coming=handed_over[_COMING]
    )


def partition_to_bytes(partition: PartitionImage) -> tuple[dict[str, Any], bytes]:
    """Converts a partition for sending to another server. Returns its entry in a snapshot's
    metadata, and its tensors as a safetensors file."""
    tensors = _named(partition)
    header = _header(tensors, {})
    return _entry(partition), b"".join(
        [len(header).to_bytes(8, "little"), header, *map(bytes_of, tensors.values())]
    )


def partition_from_bytes(
    entry: Mapping[str, Any],
    data: memoryview,
    spec: PartitionSpec,
    optimizer: OptimizerSettings | None,
) -> PartitionImage:
    """Restores a partition, with its own tensors, from the result of `partition_to_bytes`. Raises
    KeyError, TypeError or ValueError for other data.

    `optimizer`: the optimizer that the partition's state belongs to.
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:begin]))

    def read(name: str) -> torch.Tensor:
        found = header[name]
        first, end = found["data_offsets"]
        dtype, shape = _DTYPES[found["dtype"]], tuple(map(int, found["shape"]))
        if math.prod(shape) * dtype.itemsize != end - first:
            raise ValueError(
                f"tensor {name!r} of shape {shape} does not match its size of {end - first} bytes"
            )
        tensor = torch.empty(shape, dtype=dtype)
        bytes_of(tensor)[:] = data[begin + first : begin + end]
        return tensor

    return _partition(read, spec, optimizer, entry)


def _taken_to_json(taken: Taken | None, prefix: str) -> dict[str, Any] | None:
    if taken is None:
        return None
    entries = [
        _entry(image, prefix) | {"spec": spec_to_json(image.spec)}
        for image in taken.images.values()
    ]
    return {"move": taken.move, "partitions": entries}


def _taken_from(
    read: Callable[[str], torch.Tensor],
    prefix: str,
    value: Mapping[str, Any] | None,
    optimizer: OptimizerSettings | None,
) -> Taken | None:
    if value is None:
        return None
    entries: Sequence[Mapping[str, Any]] = value["partitions"]
    images = (
        _partition(read, spec_from_json(entry["spec"]), optimizer, entry, prefix)
        for entry in entries
    )
    return Taken(
        move=int(value["move"]), images={image.spec.partition_id: image for image in images}
    )


def _named(partition: PartitionImage, prefix: str = "") -> dict[str, torch.Tensor]:
    number = f"{prefix}{partition.spec.partition_id}"
    state = {f"{number}:state:{name}": tensor for name, tensor in partition.state().items()}
    if partition.rows is not None:
        return {
            f"{number}:rows:{name}": torch.from_numpy(array)
            for name, array in _arrays(partition.rows).items()
        }
    return (
        {f"{number}:values": partition.values}
        | state
        | {f"{number}:base:{v}": tensor for v, tensor in partition.base_values.items()}
    )


def _arrays(rows: RowsImage) -> dict[str, npt.NDArray[Any]]:
    state = {f"state:{name}": array for name, array in rows.state.items()}
    return {"ids": rows.ids, "values": rows.values, "updated_at": rows.updated_at, **state}


def _metadata(image: ServerImage) -> dict[str, str]:
    text = dumps(
        {
            "version": FORMAT_VERSION,
            "state": state_to_json(image.state),
            "partitions": [_entry(partition) for partition in image.partitions],
            _TAKEN: _taken_to_json(image.taken, _TAKEN),
            _COMING: _taken_to_json(image.coming, _COMING),
        }
    )
    return {"format": FORMAT, "shoal": text, "xxh3": f"{checksum(text.encode()):016x}"}


def _entry(partition: PartitionImage, prefix: str = "") -> dict[str, Any]:
    return {
        "partition_id": partition.spec.partition_id,
        "version": partition.version,
        "sequences": partition.sequences,
        "batches": partition.batches,
        "left": partition.left,
        "restoration": partition.restoration,
        "pulled": dict(partition.pulled),
        "base_values": sorted(partition.base_values),
        "runs": [[run.first, run.end] for run in partition.runs],
        "digests": {
            name: f"{checksum(bytes_of(tensor)):016x}"
            for name, tensor in _named(partition, prefix).items()
        },
    }


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        entries[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # the format asks for aligned data


def _checked_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise CorruptDataError(
            f"{path} is a safetensors file but not a snapshot of a parameter server "
            f"(format={metadata.get('format')!r}); remove it, or use another --data-dir",
            reason="SNAPSHOT_FOREIGN",
        )
    text = metadata["shoal"]
    if f"{checksum(text.encode()):016x}" != metadata["xxh3"]:
        raise ValueError("the metadata does not match its checksum")
    parsed: dict[str, Any] = json.loads(text)
    if not _OLDEST_READABLE <= (version := parsed["version"]) <= FORMAT_VERSION:
        raise CorruptDataError(
            f"{path} has format version {version}, but this release reads {_OLDEST_READABLE} to "
            f"{FORMAT_VERSION}; start the release that wrote it",
            reason="SNAPSHOT_NEWER" if version > FORMAT_VERSION else "SNAPSHOT_OLDER",
        )
    return parsed


def _partition(
    read: Callable[[str], torch.Tensor],
    spec: PartitionSpec,
    optimizer: OptimizerSettings | None,
    entry: Mapping[str, Any],
    prefix: str = "",
) -> PartitionImage:
    if entry["partition_id"] != spec.partition_id:
        raise ValueError(
            f"partition {entry['partition_id']} has the pieces of partition {spec.partition_id}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, digest in entry["digests"].items():
        tensor = read(name)
        if f"{checksum(bytes_of(tensor)):016x}" != digest:
            raise ValueError(f"tensor {name!r} does not match its checksum")
        tensors[name.removeprefix(prefix)] = tensor
    if spec.bucket is not None:
        return _bucket(spec, spec.bucket, entry, tensors)
    values = tensors.pop(f"{spec.partition_id}:values")
    _check_shape(spec, "values", values, spec.length, spec.element.torch)
    base_values = {
        int(version): tensors.pop(f"{spec.partition_id}:base:{version}")
        for version in entry["base_values"]
    }
    for version, copy in base_values.items():
        _check_shape(spec, f"version {version}", copy, spec.length, spec.element.torch)
    runs = tuple(
        _run(spec, place, first, end, tensors, optimizer)
        for place, (first, end) in enumerate(entry["runs"])
    )
    bounds = [0, *(run.end for run in runs)]
    if runs and ([run.first for run in runs] != bounds[:-1] or bounds[-1] != len(spec.pieces)):
        raise ValueError(
            f"the runs of partition {spec.partition_id} do not cover its {len(spec.pieces)} pieces"
        )
    if tensors:
        raise ValueError(f"tensor {min(tensors)!r} does not belong to the optimizer's state")
    return PartitionImage(
        spec=spec,
        version=int(entry["version"]),
        values=values,
        runs=runs,
        sequences={str(member): int(sequence) for member, sequence in entry["sequences"].items()},
        batches={str(member): int(batch) for member, batch in entry["batches"].items()},
        left=[int(batch) for batch in entry["left"]],
        pulled={str(member): int(version) for member, version in entry["pulled"].items()},
        base_values=base_values,
    )


def _bucket(
    spec: PartitionSpec, bucket: Bucket, entry: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> PartitionImage:
    """Restores the image of a bucket of a table from its metadata entry and its tensors."""
    prefix = f"{spec.partition_id}:rows:"
    arrays = {name.removeprefix(prefix): tensor.numpy() for name, tensor in tensors.items()}
    begun = Rows(bucket.spec, bucket.dim)
    count = len(arrays["ids"])
    expected = {
        "ids": ((count,), np.int64),
        "values": ((count, bucket.dim), np.float32),
        "updated_at": ((count,), np.int64),
        **{
            f"state:{name}": ((count, *begun.state_shape(name)), np.float32)
            for name in begun.state_names
        },
    }
    if {name: (array.shape, array.dtype.type) for name, array in arrays.items()} != expected:
        raise ValueError(f"the rows of partition {spec.partition_id} do not match the layout")
    return PartitionImage(
        spec=spec,
        version=int(entry["version"]),
        values=torch.empty(0),
        runs=(),
        sequences={str(member): int(sequence) for member, sequence in entry["sequences"].items()},
        batches={str(member): int(batch) for member, batch in entry["batches"].items()},
        left=[int(batch) for batch in entry["left"]],
        rows=RowsImage(
            ids=arrays["ids"],
            values=arrays["values"],
            state={name: arrays[f"state:{name}"] for name in begun.state_names},
            updated_at=arrays["updated_at"],
        ),
        restoration=int(entry.get("restoration", 0)),  # older releases had none
    )


def _run(
    spec: PartitionSpec,
    place: int,
    first: int,
    end: int,
    tensors: dict[str, torch.Tensor],
    optimizer: OptimizerSettings | None,
) -> RunImage:
    """Extracts the tensors of one run from a partition's tensors."""
    if not 0 <= first < end <= len(spec.pieces):
        raise ValueError(f"partition {spec.partition_id} has no run of pieces {first} to {end}")
    if optimizer is None:
        return RunImage(first=first, end=end, state={})
    prefix = f"{spec.partition_id}:state:{place}:"
    state = {
        name: tensors.pop(prefix + name)
        for name in optimizer.state_names
        if prefix + name in tensors
    }
    length = sum(optimizer.state_length(piece) for piece in spec.pieces[first:end])
    for name, tensor in state.items():
        if tensor.ndim:  # scalars count steps
            _check_shape(spec, name, tensor, length, optimizer.state_dtype(spec.element))
    return RunImage(first=first, end=end, state=state)


def _check_shape(
    spec: PartitionSpec, name: str, tensor: torch.Tensor, length: int, dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != (length,) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} of partition {spec.partition_id} is {tensor.dtype}{list(tensor.shape)}; "
            f"expected {dtype}{[length]}"
        )


def _sync_directory(directory: Path) -> None:
    """Syncs the directory that contains the file, to make a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
