"""Positions of scripts: a sum over the ranks reveals whether they are at different steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal_worker.elastic.contract.step import PLACE_WORD_LENGTH, ScriptPosition, agree

numbers = st.integers(0, 2**20 - 1)
places = st.builds(
    ScriptPosition, st.just("loader"), numbers, numbers, numbers, st.integers(0, 2**40 - 1)
)


def summed(ranks: list[ScriptPosition]) -> list[float]:
    """Returns the sum as an all-reduce in float64 computes it."""
    return torch.tensor([place.word() for place in ranks], dtype=torch.float64).sum(0).tolist()


@given(places, st.integers(1, 1000))
def test_any_number_of_ranks_at_one_position_agree(place: ScriptPosition, ranks: int) -> None:
    assert len(place.word()) == PLACE_WORD_LENGTH
    assert agree(summed([place] * ranks))


@given(st.lists(places, min_size=1, max_size=8))
def test_ranks_agree_only_at_one_place(ranks: list[ScriptPosition]) -> None:
    assert agree(summed(ranks)) == (len(set(ranks)) == 1)


@pytest.mark.parametrize("field", ["number", "epoch", "step", "dealing"])
def test_one_of_many_ranks_slightly_off_is_found(field: str) -> None:
    most = 2**20 - 1
    place = ScriptPosition("loader", most, most, most, most)
    assert not agree(summed([place] * 8191 + [place._replace(**{field: most - 1})]))


@pytest.mark.parametrize("off", [1, 2**20 - 6, 2**20, 2**39])
def test_dealings_that_differ_in_few_digits_are_distinguished(off: int) -> None:
    assert not agree(
        summed([ScriptPosition("a", 1, 0, 0, 5)] * 999 + [ScriptPosition("a", 1, 0, 0, 5 + off)])
    )


def test_large_numbers_wrap() -> None:
    assert agree(summed([ScriptPosition("a", 1, 10**7, 10**7, 2**64 - 1)] * 3))
    assert not agree(
        summed([ScriptPosition("a", 1, 10**7, 10**7), ScriptPosition("a", 1, 10**7, 10**7 + 1)])
    )
