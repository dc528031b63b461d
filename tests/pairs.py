"""Products of independent axes: `make test` runs cases that cover all pairs of values, `make
parity` the rest.

Most faults need one value, or two values of different axes. Each value of each axis meets each
value of each other axis in at least one case. Faults that need three values at once are found by
`make parity`, or by a case in `also`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]


def by_pairs(*, also: Collection[Case] = (), **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of its arguments' values.

    Args:
        also: cases that `make test` runs as well, because they once found a fault.
        axes: the values of each argument, by the argument's name.
    """
    product = list(itertools.product(*axes.values()))
    unknown = [case for case in also if case not in product]
    assert not unknown, f"{unknown} are no cases of {list(axes)}"
    chosen = covering(product, also)
    cases = [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.matrix) for case in product
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def covering(product: Collection[Case], also: Collection[Case] = ()) -> list[Case]:
    """Returns `also` and cases that together cover all pairs of the product. Each case is the first
    one that adds the most pairs."""
    chosen = list(also)
    missing = set().union(*map(_pairs, product)).difference(*map(_pairs, chosen))
    while missing:
        best = max(product, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(case), 2))
