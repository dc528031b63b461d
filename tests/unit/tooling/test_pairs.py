"""The cases that represent a product of axes include all pairs of its values."""

import itertools

import pytest

from tests.pairs import by_pairs, covering

AXES = {"strategy": ["ddp", "zero1", "zero3"], "micro": [None, 2], "kind": ["a", "b", "c", "d"]}
PRODUCT = list(itertools.product(*AXES.values()))


def test_values_of_different_axes_all_meet_in_nearly_as_few_cases_as_possible() -> None:
    chosen = covering(PRODUCT)
    for one, other in itertools.combinations(range(3), 2):
        assert {(case[one], case[other]) for case in chosen} == {
            (case[one], case[other]) for case in PRODUCT
        }
    assert 12 <= len(chosen) <= 14, "there are twelve pairs of strategies and kinds"


def test_all_cases_of_the_product_are_run_by_make_test_or_make_parity() -> None:
    also = ("zero3", 2, "d")
    mark = by_pairs(also=[also], **AXES).mark
    names, cases = mark.args
    assert names == tuple(AXES)
    assert [case.values for case in cases] == PRODUCT
    assert {len(case.marks) for case in cases} == {0, 1}
    assert next(case for case in cases if case.values == also).marks == ()


def test_case_outside_the_product_is_refused() -> None:
    with pytest.raises(AssertionError, match="are no cases of"):
        by_pairs(also=[("ddp", 3, "a")], **AXES)
