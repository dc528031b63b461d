"""Equal states have equal digests. Any change of a type, a value, a significant order or a single
bit changes the digest."""

import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import CorruptDataError
from shoal_worker.state.digest import bytes_of, digest, state_digest, tensor_digest
from shoal_worker.state.tree import flatten

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), "b": torch.zeros(3)},
    "optimizer": {0: {"step": torch.tensor(3.0), "lr": 0.1}, "groups": [1, 2]},
}


def test_insertion_order_of_dicts_does_not_matter():
    turned = {
        "optimizer": {"groups": [1, 2], 0: {"lr": 0.1, "step": torch.tensor(3.0)}},
        "model": {"b": torch.zeros(3), "w": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)},
    }
    assert state_digest(turned) == state_digest(STATE)


def test_order_of_an_ordered_dict_and_of_a_list_matters():
    assert state_digest(OrderedDict(a=1, b=2)) != state_digest(OrderedDict(b=2, a=1))
    assert state_digest([1, 2]) != state_digest([2, 1])


def test_tied_tensors_and_equal_copies_have_one_digest():
    shared = torch.ones(3)
    assert state_digest([shared, shared]) == state_digest([torch.ones(3), torch.ones(3)])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        ([1], (1,)),
        ("1", 1),
        (b"a", "a"),
        ({1: 0}, {"1": 0}),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (0.0, -0.0),
        (float("nan"), float("inf")),
        ({"name": "a"}, {"name": "b"}),
        (None, {}),
    ],
)
def test_states_that_differ_have_different_digests(a, b):
    assert state_digest({"x": a}) != state_digest({"x": b})


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 63), st.integers(0, 7))
def test_one_flipped_bit_changes_the_digest(byte, bit):
    tensor = torch.arange(64, dtype=torch.uint8).view(torch.float16)
    before = tensor_digest(tensor)
    tensor.view(torch.uint8)[byte] ^= 1 << bit
    assert tensor_digest(tensor) != before


def test_memory_layout_does_not_matter():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert tensor_digest(conjugate) == tensor_digest(torch.tensor([1 - 2j]))


def test_bytes_of_a_contiguous_tensor_share_its_memory():
    for tensor in (
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros((), dtype=torch.bool),
        torch.zeros(2, 2),
        torch.zeros(0, 4),
    ):
        view = bytes_of(tensor)
        assert view.nbytes == tensor.numel() * tensor.element_size()
        if view.nbytes:
            view[0] = 1
            assert tensor.view(-1).view(torch.uint8)[0] == 1


def test_another_process_computes_the_same_digest():
    program = (
        "import torch; from shoal_worker.state.digest import state_digest;"
        "print(state_digest({'s': {'a', 'b', 'c'}, 't': torch.arange(5), 'd': {'x': 1, 2: None}}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert int(printed) == state_digest(
        {"d": {2: None, "x": 1}, "t": torch.arange(5), "s": {"c", "b", "a"}}
    )


def test_a_missing_tensor_is_corrupt_data():
    structure, _ = flatten({"t": torch.ones(1)})
    with pytest.raises(CorruptDataError, match="'t'"):
        digest(structure, {})
