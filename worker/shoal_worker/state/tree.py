"""Converts any training state to a JSON structure and named tensors, and back, exactly and without
pickle.

Every state that leaves a process is converted by `flatten`: state sent to joiners, checkpoints, and
the copy kept for repeating a step. `flatten` never copies tensor data: it returns the state's own
tensors (detached). It does not transfer bytes, compute digests or access files.

The structure is plain JSON. Strings, integers up to 64 bits, finite floats, booleans, None, lists
and dicts with string keys are stored as they are. Any other value is an object with the marker key
`"!"`, which contains its type:

    {"!": "tensor", "name": N}                           the tensor N
    {"!": "ndarray", "name": N, "dtype": D, "shape": S}  the tensor N holds the array's bytes
    {"!": "scalar", "dtype": D, "data": base64}          a numpy scalar
    {"!": "int", "hex": ...}  {"!": "float", "hex": big-endian IEEE 754}
    {"!": "str"|"bytes", "data": base64}
    {"!": "tuple"|"set"|"frozenset", "items": [...]}
    {"!": "dict"|"ordered"|"counter"|"default", "items": [[key, value], ...]}
        (default also has "factory", ordered perhaps "metadata")

A tensor's name is its path, as in `optimizer/state/0/exp_avg`: keys joined by "/", with "~" and "/"
in keys escaped as in JSON pointers (RFC 6901), so that no two paths have the same name.

Not preserved: `requires_grad` and the Parameter type (only values are kept), strides, and the
identity of containers (a list that occurs twice becomes two lists). The identity of tensors is
preserved: two references to the same memory become one object.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.state.device_reader import HostCopies, keep_fitting

Json = Any
"""None, bool, int, float, str, list of Json, or dict of str to Json."""

MAX_DEPTH = 64
"""Maximum depth of nested containers. A deeper state, or one that contains itself, raises an
error."""

_MARK = "!"
_ROOT = "~root"
_INT64 = range(-(2**63), 2**63)
_ARRAY_KINDS = frozenset("biufcmMSU")
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)},
}
_KEY_TYPES = (str, int, bool, float, type(None), bytes, tuple)
_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]+")


def flatten(state: object, *, outlines: bool = False) -> tuple[Json, dict[str, torch.Tensor]]:
    """Converts a state to a JSON structure and tensors. Returns (structure, tensors by name).
    `outlines`: True to accept tensors on the meta device as placeholders for other tensors.

    The tensors share memory with the state, except for arrays that torch cannot wrap (read-only or
    not contiguous), which are copied.

    Raises:
        ConfigurationError (STATE_UNSUPPORTED): the state contains an unsupported value; the message
            names its path and type.
    """
    flattener = _Flattener(outlines=outlines)
    return flattener.encode(state, (), 0), flattener.tensors


def unflatten(structure: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reassembles a state from the result of `flatten`. The given tensors become part of the result
    and are not copied.

    Raises:
        CorruptDataError: the structure was not produced by `flatten`, or it refers to a missing
            tensor.
    """
    return _Unflattener(tensors).decode(structure, 0)


def tensor_names(structure: Json) -> dict[str, str]:
    """Returns the tensors in the structure of a state, including arrays: path -> name. A tensor
    that occurs several times has several paths (`join_path`), but one name.

    Raises:
        KeyError, TypeError, ValueError: the structure was not produced by `flatten`.
    """
    return dict(_named(structure, ()))


def _named(node: Json, path: tuple[object, ...]) -> Iterator[tuple[str, str]]:
    if not isinstance(node, dict | list):
        return
    items: Iterable[tuple[Any, Json]]
    if isinstance(node, list):
        items = enumerate(node)
    elif _MARK not in node:
        items = node.items()
    elif node[_MARK] in ("tensor", "ndarray"):
        yield join_path(path), node["name"]
        return
    elif node[_MARK] in ("dict", "ordered", "counter", "default"):
        items = [(unflatten(key, {}), item) for key, item in node["items"]]
    else:
        items = enumerate(node.get("items", ()))
    for key, item in items:
        yield from _named(item, (*path, key))


def check_carried(tensor: torch.Tensor, where: str) -> None:
    """Raises ConfigurationError (STATE_UNSUPPORTED) unless `tensor` is a plain dense tensor with
    data. `where`: name of the tensor, for the error."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _unsupported(
            where,
            tensor,
            "a plain tensor; call `.to_local()` or `.full_tensor()` on a DTensor first",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _unsupported(
            where,
            tensor,
            f"a dense tensor (this one has layout {tensor.layout}, dtype {tensor.dtype})",
        )
    if tensor.device.type == "meta":
        raise _unsupported(where, tensor, "a tensor with data (this one is on the meta device)")


def join_path(path: tuple[object, ...]) -> str:
    """Returns the name of the tensor at a path of keys and indices."""
    return "/".join(_segment(key) for key in path) if path else _ROOT


def _segment(key: object) -> str:
    if type(key) is int:
        return str(key)
    if type(key) is str:
        escaped = _printable(key.replace("~", "~0").replace("/", "~1"))
        return f"~s{escaped}" if _INTEGER.fullmatch(key) else escaped
    return "~k" + _printable(repr(key).replace("~", "~0").replace("/", "~1"))


def _printable(text: str) -> str:
    """Replaces lone surrogates, which cannot be encoded as UTF-8, with `~u` and their codes."""
    return _SURROGATE.sub(lambda found: f"~u{ord(found.group()):04x}", text)


def _unsupported(where: str, value: object, expected: str) -> ConfigurationError:
    kind = type(value)
    return ConfigurationError(
        f"state at {where!r} has type {kind.__module__}.{kind.__qualname__}, which cannot be saved "
        f"or sent: expected {expected}",
        reason="STATE_UNSUPPORTED",
    )


_PLAIN_EXPECTED = (
    "dict, list, tuple, set, str, int, float, bool, None, bytes, a tensor, or a numpy array or "
    "scalar; have the object's state_dict() return these instead"
)


class _Flattener:
    def __init__(self, *, outlines: bool) -> None:
        self._outlines = outlines
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}
        # Arrays created here must live longer than the traversal, because `_names` is keyed by
        # their identity.
        self._keep: list[object] = []

    def encode(self, value: object, path: tuple[object, ...], depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise ConfigurationError(
                f"state at {join_path(path)[:200]!r} is nested deeper than {MAX_DEPTH} levels; "
                "check whether it contains itself",
                reason="STATE_UNSUPPORTED",
            )
        if isinstance(value, torch.Tensor):
            return {_MARK: "tensor", "name": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        encoder = _ENCODERS.get(kind)
        if encoder is None:
            raise _unsupported(join_path(path), value, _PLAIN_EXPECTED)
        return encoder(self, value, path, depth)

    def _tensor(self, tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        name = join_path(path)
        if not (self._outlines and tensor.is_meta):
            check_carried(tensor, name)
        # state_dict() detaches, so tied parameters arrive as different objects that share memory.
        key: object = id(tensor)
        if tensor.numel() and not tensor.is_meta:
            key = (
                tensor.data_ptr(),
                tensor.dtype,
                tensor.device,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            )
        if key in self._names:
            return self._names[key]
        self._names[key] = name
        self._keep.append(tensor)
        self.tensors[name] = tensor.detach()
        return name

    def _array(self, array: np.ndarray[Any, Any], path: tuple[object, ...]) -> Json:
        name = join_path(path)
        if type(array) is not np.ndarray or array.dtype.kind not in _ARRAY_KINDS:
            raise _unsupported(
                name,
                array,
                f"an ndarray of numbers, strings or times (this one has dtype {array.dtype})",
            )
        key = ("ndarray", id(array))
        if key not in self._names:
            self._names[key] = name
            self._keep.append(array)
            flat = (
                array.ravel()
                if array.flags.c_contiguous and array.flags.writeable
                else array.flatten()
            )
            self.tensors[name] = torch.from_numpy(
                flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
            )
        return {
            _MARK: "ndarray",
            "name": self._names[key],
            "dtype": array.dtype.str,
            "shape": list(array.shape),
        }

    def _scalar(self, value: np.generic, path: tuple[object, ...]) -> Json:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise _unsupported(
                join_path(path),
                value,
                f"a numpy scalar of a number, string or time (this one has dtype {value.dtype})",
            )
        return {_MARK: "scalar", "dtype": value.dtype.str, "data": _base64(value.tobytes())}

    def int_(self, value: int, path: tuple[object, ...], depth: int) -> Json:
        return value if value in _INT64 else {_MARK: "int", "hex": hex(value)}

    def float_(self, value: float, path: tuple[object, ...], depth: int) -> Json:
        return (
            value
            if math.isfinite(value)
            else {_MARK: "float", "hex": struct.pack(">d", value).hex()}
        )

    def str_(self, value: str, path: tuple[object, ...], depth: int) -> Json:
        # JSON would combine two lone surrogates into one character.
        return (
            {_MARK: "str", "data": _base64(value.encode("utf-8", "surrogatepass"))}
            if _SURROGATE.search(value)
            else value
        )

    def bytes_(self, value: bytes, path: tuple[object, ...], depth: int) -> Json:
        return {_MARK: "bytes", "data": _base64(value)}

    def list_(self, value: list[Any], path: tuple[object, ...], depth: int) -> Json:
        return [self.encode(item, (*path, index), depth + 1) for index, item in enumerate(value)]

    def tuple_(self, value: tuple[Any, ...], path: tuple[object, ...], depth: int) -> Json:
        return {_MARK: "tuple", "items": self.list_(list(value), path, depth)}

    def set_(self, value: set[Any] | frozenset[Any], path: tuple[object, ...], depth: int) -> Json:
        for item in value:
            _check_key(item, path, "a set member")
        items = [self.encode(item, path, depth + 1) for item in value]
        return {_MARK: type(value).__name__, "items": sorted(items, key=_canonical)}

    def dict_(self, value: dict[Any, Any], path: tuple[object, ...], depth: int) -> Json:
        plain = all(
            type(key) is str and key != _MARK and not _SURROGATE.search(key) for key in value
        )
        if plain and type(value) is dict:
            return {key: self.encode(item, (*path, key), depth + 1) for key, item in value.items()}
        return {_MARK: "dict", "items": self._pairs(value, path, depth)}

    def ordered(self, value: OrderedDict[Any, Any], path: tuple[object, ...], depth: int) -> Json:
        node = {_MARK: "ordered", "items": self._pairs(value, path, depth)}
        # Module.state_dict() attaches the modules' versions to its result, and load_state_dict()
        # reads them.
        metadata = getattr(value, "_metadata", None)
        return (
            node
            if metadata is None
            else {**node, "metadata": self.encode(metadata, (*path, "_metadata"), depth + 1)}
        )

    def counter(self, value: Counter[Any], path: tuple[object, ...], depth: int) -> Json:
        return {_MARK: "counter", "items": self._pairs(value, path, depth)}

    def default(self, value: defaultdict[Any, Any], path: tuple[object, ...], depth: int) -> Json:
        for name, factory in _FACTORIES.items():
            if factory is value.default_factory:
                return {_MARK: "default", "factory": name, "items": self._pairs(value, path, depth)}
        raise ConfigurationError(
            f"state at {join_path(path)!r} is a defaultdict with "
            f"default_factory={value.default_factory!r}; expected one of {', '.join(_FACTORIES)}, "
            "or a plain dict",
            reason="STATE_UNSUPPORTED",
        )

    def _pairs(
        self, value: Mapping[Any, Any], path: tuple[object, ...], depth: int
    ) -> list[list[Json]]:
        for key in value:
            _check_key(key, path, "a dict key")
        return [
            [self.encode(key, path, depth + 1), self.encode(item, (*path, key), depth + 1)]
            for key, item in value.items()
        ]


def _check_key(key: object, path: tuple[object, ...], what: str) -> None:
    if type(key) not in _KEY_TYPES:
        raise _unsupported(
            join_path(path), key, f"{what} of type str, int, float, bool, None, bytes or tuple"
        )
    if type(key) is tuple:
        for item in key:
            _check_key(item, path, what)


_ENCODERS: dict[type, Callable[[_Flattener, Any, tuple[object, ...], int], Json]] = {
    int: _Flattener.int_,
    float: _Flattener.float_,
    str: _Flattener.str_,
    bytes: _Flattener.bytes_,
    list: _Flattener.list_,
    tuple: _Flattener.tuple_,
    set: _Flattener.set_,
    frozenset: _Flattener.set_,
    dict: _Flattener.dict_,
    OrderedDict: _Flattener.ordered,
    Counter: _Flattener.counter,
    defaultdict: _Flattener.default,
}


class _Unflattener:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def decode(self, structure: Json, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:
            raise CorruptDataError(
                f"the state's structure is nested deeper than {MAX_DEPTH} levels"
            )
        if structure is None or isinstance(structure, bool | int | float | str):
            return structure
        if isinstance(structure, list):
            return [self.decode(item, depth + 1) for item in structure]
        if not isinstance(structure, dict):
            raise CorruptDataError(
                f"the state's structure contains an object of type {type(structure).__name__}, "
                "which is not JSON"
            )
        if _MARK not in structure:
            return {key: self.decode(item, depth + 1) for key, item in structure.items()}
        try:
            return self._marked(structure, depth)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            binascii.Error,
            struct.error,
        ) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(
                f"the state's structure contains a malformed {structure.get(_MARK)!r}: {error!r}"
            ) from error

    def _marked(self, node: dict[str, Json], depth: int) -> Any:
        match node[_MARK]:
            case "tensor":
                return self._tensor(node["name"])
            case "ndarray":
                return self._array(node)
            case "scalar":
                return np.ndarray((), _dtype(node["dtype"]), buffer=_unbase64(node["data"]))[()]
            case "int":
                return int(node["hex"], 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(node["hex"]))[0]
            case "str":
                return _unbase64(node["data"]).decode("utf-8", "surrogatepass")
            case "bytes":
                return _unbase64(node["data"])
            case "tuple" | "set" | "frozenset" as name:
                items = [self.decode(item, depth + 1) for item in node["items"]]
                return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](items)
            case "dict" | "ordered" | "counter" | "default" as name:
                return self._mapping(name, node, depth)
        raise CorruptDataError(
            f"the state's structure contains an unknown kind {node[_MARK]!r}; was it written by a "
            "newer release?"
        )

    def _mapping(self, name: str, node: dict[str, Json], depth: int) -> dict[Any, Any]:
        pairs = [
            (self.decode(key, depth + 1), self.decode(item, depth + 1))
            for key, item in node["items"]
        ]
        match name:
            case "ordered":
                ordered = OrderedDict(pairs)
                if "metadata" in node:
                    ordered._metadata = self.decode(node["metadata"], depth + 1)  # type: ignore[attr-defined]
                return ordered
            case "counter":
                return Counter(dict(pairs))
            case "default":
                return defaultdict(_FACTORIES[node["factory"]], pairs)
        return dict(pairs)

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CorruptDataError(
                f"the state's structure refers to tensor {name!r}, which is missing"
            ) from None

    def _array(self, node: dict[str, Json]) -> np.ndarray[Any, Any]:
        name = node["name"]
        if name not in self._arrays:
            shape, dtype = tuple(node["shape"]), _dtype(node["dtype"])
            held = self._tensor(name)
            if held.dtype is not torch.uint8 or held.numel() != math.prod(shape) * dtype.itemsize:
                raise CorruptDataError(
                    f"tensor {name!r} does not match an array of shape {shape} and dtype {dtype}"
                )
            # A copy, because arrays of a loaded state must own aligned memory.
            data = held.detach().cpu().contiguous().numpy().tobytes()
            self._arrays[name] = (
                np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
                if data
                else np.zeros(shape, dtype)
            )
        return self._arrays[name]


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _ARRAY_KINDS:
        raise CorruptDataError(
            f"the state's structure contains an array of dtype {text!r}, which Shoal never writes"
        )
    return dtype


def _canonical(structure: Json) -> str:
    return json.dumps(structure, sort_keys=True, separators=(",", ":"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# ------------------------------------------------------------------------------------------- a copy


class Snapshot:
    """Copy of a state in host memory, so that training can continue while the copy is written to
    files. Consists of the result of `flatten`, with contiguous CPU tensors that are not used
    elsewhere.
    """

    def __init__(
        self, structure: Json, tensors: dict[str, torch.Tensor], copies: HostCopies
    ) -> None:
        """`structure`, `tensors`: result of `flatten`. `copies`: transfers from devices into the
        tensors.
        """
        self.structure = structure
        self._tensors = tensors
        self._copies = copies

    @classmethod
    def take(
        cls,
        state: object,
        *,
        without: Collection[str] = (),
        memory: dict[str, torch.Tensor] | None = None,
    ) -> Snapshot:
        """Copies `state`, which may be modified as soon as this method returns, even if copies from
        a device are still in progress. `without`: names of tensors that are not copied. `memory`:
        `host_tensors` of an earlier snapshot that is no longer needed. All tensors are removed from
        it, and their memory is reused or freed.

        Raises:
            ConfigurationError (STATE_UNSUPPORTED): the state contains an unsupported value.
        """
        structure, tensors = flatten(state)
        copies = HostCopies()
        wanted = {name: tensor for name, tensor in tensors.items() if name not in without}
        memory = keep_fitting({} if memory is None else memory, wanted)
        copied = {
            name: copies.of(tensor, memory.pop(name, None)) for name, tensor in wanted.items()
        }
        copies.begun()
        return cls(structure, copied, copies)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The copied tensors by name. Waits until the copies are complete. May be used from any
        thread.

        Raises:
            RuntimeError: copying from a device has failed.
        """
        self._copies.arrive()
        return self._tensors

    @property
    def host_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name. They contain the copied values only after `tensors` has returned."""
        return dict(self._tensors)

    @property
    def nbytes(self) -> int:
        """Total size of the tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def state(self) -> Any:
        """Reassembles the state, which then shares memory with this snapshot."""
        return unflatten(self.structure, self.tensors)


# ----------------------------------------------------------------------- one rank's part of a state


@dataclass(frozen=True, kw_only=True)
class Run:
    """Contiguous range of one flat vector's elements, with their values on this rank."""

    vector: torch.Tensor
    """The vector, as a flat tensor on the meta device."""
    begin: int
    """Index of the range's first element in the vector."""
    values: torch.Tensor
    """Values of the elements, flat. Share memory with the live state. May extend beyond the end of
    the vector, because of padding."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One rank's part of a sharded state, to be written to a checkpoint.

    A strategy arranges sharded tensors in flat vectors. In `state`, each such tensor is a view of a
    vector on the meta device. The runs in `shards` contain this rank's values; the views show which
    elements of which tensor a run contains.
    """

    state: Any
    """The complete state as on a single process, with views on the meta device in place of sharded
    tensors. The same on all ranks."""
    count: int
    """Number of shards of the complete state."""
    shards: Mapping[int, Sequence[Run]]
    """Shards that this rank writes, by number, counted from 0. Each shard is written by exactly one
    rank."""
