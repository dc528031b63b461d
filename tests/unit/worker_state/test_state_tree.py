"""Training state survives flatten, JSON and unflatten exactly. Unsupported values are refused by
name."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_worker.state.tree import MAX_DEPTH, flatten, unflatten

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def round_trip(state):
    structure, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(structure, allow_nan=False)), tensors)


def same(a, b) -> bool:
    """Returns whether two states are equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (
            a == b or (math.isnan(a) and math.isnan(b))
        )
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return (
            factory
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return Counter(map(repr, a)) == Counter(map(repr, b))
    return a == b


@st.composite
def torch_tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)


arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.byte_string_dtypes(),
        hnp.datetime64_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
text = st.text(st.characters(), max_size=6) | st.text("\ud800\udc00!~/1", max_size=4) | st.just("!")
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | text
    | st.binary(max_size=8)
)
keys = text | st.integers() | st.booleans() | st.none() | st.tuples(text, st.integers())
numpy_scalars = arrays.filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0])
factories = st.sampled_from([None, list, dict, int, float, set, str, tuple, bool, bytes])


def containers(inner):
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.builds(defaultdict, factories, pairs),
        st.lists(keys, max_size=4).map(Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    )


states = st.recursive(scalars | torch_tensors() | arrays | numpy_scalars, containers, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(states)
def test_any_state_survives_a_json_round_trip_bit_for_bit(state):
    assert same(round_trip(state), state)


def test_no_two_paths_share_a_tensor_name():
    state = {
        "a/b": torch.ones(1),
        "a": {"b": torch.ones(2)},
        "x": {1: torch.ones(3), "1": torch.ones(4), "~s1": torch.ones(5), None: torch.ones(6)},
    }
    structure, tensors = flatten(state)
    assert len(tensors) == 6
    assert same(unflatten(structure, tensors), state)


def test_names_read_like_the_path():
    state = {
        "model": {"0.weight": torch.ones(1)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
    }
    assert set(flatten(state)[1]) == {"model/0.weight", "optimizer/state/0/exp_avg"}


def test_flatten_copies_no_tensor_data():
    tensor, array = torch.ones(3), np.ones(3)
    _, tensors = flatten({"t": tensor, "a": array})
    assert tensors["t"].data_ptr() == tensor.data_ptr()
    assert tensors["a"].data_ptr() == array.__array_interface__["data"][0]


def test_read_only_and_strided_arrays_are_supported():
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    state = {
        "frozen": frozen,
        "strided": np.arange(6)[::2],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    assert same(round_trip(state), state)


def test_arrays_are_returned_writable_and_independent():
    array = np.arange(3)
    back = round_trip({"a": array})["a"]
    back[0] = 9
    assert array[0] == 0


def test_a_tensor_referenced_twice_stays_one_object():
    tensor = torch.ones(2)
    back = round_trip([tensor, {"again": tensor}, torch.ones(2)])
    assert back[0] is back[1]["again"]
    assert back[2] is not back[0]


def test_tied_parameters_stay_tied_though_state_dict_detaches_them():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    structure, tensors = flatten(Tied().state_dict())
    assert len(tensors) == 1
    back = unflatten(structure, tensors)
    assert back["embedding.weight"] is back["head.weight"]


def test_view_of_other_shape_or_offset_is_not_mistaken_for_the_same_tensor():
    base = torch.arange(6.0)
    state = [base, base[:3], base.view(2, 3), base[1:4], torch.empty(0), torch.empty(0)]
    assert same(round_trip(state), state)
    assert len(flatten(state)[1]) == 6


def test_module_versions_in_a_state_dict_survive():
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    back = round_trip(state)
    assert back._metadata == state._metadata
    assert back._metadata["0"]["version"] == 2
    assert not hasattr(round_trip(OrderedDict(a=1)), "_metadata")


def test_parameter_values_are_stored_without_their_graph():
    back = round_trip({"p": torch.nn.Parameter(torch.ones(2))})["p"]
    assert not back.requires_grad
    assert back.equal(torch.ones(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: torch.optim.RMSprop(p, torch.tensor(0.1)),
        lambda p: torch.optim.Adafactor(p, 0.1),
        lambda p: torch.optim.NAdam(p, 0.1),
    ],
)
def test_optimizer_states_survive_and_load(make):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = make(net.parameters())
    for _ in range(2):
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    back = round_trip(state)
    assert same(back, state)
    make(torch.nn.Linear(3, 2).parameters()).load_state_dict(back)


def test_scheduler_scaler_and_random_states_survive():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    lr = torch.optim.lr_scheduler
    schedulers = [
        lr.MultiStepLR(optimizer, [2, 2, 5]),
        lr.CosineAnnealingLR(optimizer, 10),
        lr.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [3]),
        lr.LambdaLR(optimizer, lambda epoch: 0.5),
    ]
    import random

    state = {
        "schedulers": [s.state_dict() for s in schedulers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    assert same(round_trip(state), state)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (lambda: 0, "builtins.function"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (1j, "builtins.complex"),
        (np.array([object()], dtype=object), "numpy.ndarray"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.zeros(1, dtype=[("a", "i4")]), "numpy.ndarray"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (torch.empty(2, device="meta"), "torch.Tensor"),
        (torch.float32, "torch.dtype"),
        (defaultdict(lambda: 0), "defaultdict"),
    ],
)
def test_unsupported_values_are_refused_with_path_and_type(value, kind):
    with pytest.raises(ConfigurationError, match=kind) as raised:
        flatten({"user": [1, {"thing": value}]})
    assert "'user/1/thing'" in str(raised.value)
    assert raised.value.reason == "STATE_UNSUPPORTED"


@pytest.mark.parametrize(
    "state",
    [{torch.ones(1): 1}, {Colour.RED: 1}, {np.int64(3): 1}, {torch.ones(1)}, {(1, Colour.RED)}],
)
def test_unsupported_keys_and_set_members_are_refused(state):
    with pytest.raises(ConfigurationError, match=r"'at'.*(a dict key|a set member)"):
        flatten({"at": state})


def test_a_state_that_contains_itself_is_refused():
    state: dict = {}
    state["self"] = state
    with pytest.raises(ConfigurationError, match="whether it contains itself"):
        flatten(state)


def test_deepest_permitted_state_survives():
    state: object = 1
    for _ in range(MAX_DEPTH):
        state = {0: (state,)}
        if _ * 2 + 2 >= MAX_DEPTH:
            break
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    "structure",
    [
        {"!": "new-kind"},
        {"!": ["unhashable"]},
        {"!": "tensor", "name": "missing"},
        {"!": "tensor"},
        {"!": "tensor", "name": ["x"]},
        {"!": "ndarray", "name": "t", "dtype": "O", "shape": [1]},
        {"!": "ndarray", "name": "t", "dtype": "<f8", "shape": [7]},
        {"!": "ndarray", "name": "t", "dtype": "nonsense", "shape": [1]},
        {"!": "scalar", "dtype": "<f8", "data": "AAAA"},
        {"!": "int", "hex": "xyz"},
        {"!": "float", "hex": "00"},
        {"!": "bytes", "data": "***"},
        {"!": "str", "data": "/w=="},
        {"!": "set", "items": [[1]]},
        {"!": "dict", "items": [[1]]},
        {"!": "dict", "items": 5},
        {"!": "default", "factory": "eval", "items": []},
        object(),
    ],
)
def test_a_structure_that_flatten_never_makes_is_corrupt_data(structure):
    with pytest.raises(CorruptDataError):
        unflatten([structure], {"t": torch.zeros(8, dtype=torch.uint8)})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from(["tensor", "ndarray", "dict", "t", "<f8", "AAAA"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "!": st.sampled_from(
                    [
                        "tensor",
                        "ndarray",
                        "scalar",
                        "int",
                        "float",
                        "str",
                        "bytes",
                        "tuple",
                        "set",
                        "dict",
                        "default",
                        "counter",
                    ]
                )
            },
            optional=dict.fromkeys(
                ("name", "items", "dtype", "shape", "data", "hex", "factory"), inner
            ),
        )
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_any_json_either_decodes_or_is_corrupt_data(structure):
    try:
        unflatten(structure, {"t": torch.zeros(8, dtype=torch.uint8)})
    except CorruptDataError:
        pass
