"""The fence lets current members continue in older generations and refuses requests that a member
began before it was evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import StaleGenerationError
from shoal_ps_server.consistency import fence as fence_module
from shoal_ps_server.consistency.fence import Change, Fence, Verdict


def test_a_change_of_membership_does_not_interrupt_a_member() -> None:
    fence = Fence()
    fence.learn(1, ["a", "b"])
    fence.learn(2, ["a"])
    assert fence.check("a", 1) is Verdict.ADMITTED


def test_an_evicted_member_is_refused_in_every_generation_it_knows() -> None:
    fence = Fence()
    fence.learn(1, ["a", "b"])
    fence.learn(2, ["a"])
    for generation in (1, 2):
        with pytest.raises(StaleGenerationError, match="member 'b'"):
            fence.check("b", generation)


def test_readmitted_member_cannot_send_what_it_began_before() -> None:
    fence = Fence()
    for generation, members in ((1, "ab"), (2, "a"), (3, "ab")):
        fence.learn(generation, members)
    with pytest.raises(StaleGenerationError, match="not in generation 2"):
        fence.check("b", 1)
    assert fence.check("b", 3) is Verdict.ADMITTED


def test_unknown_generation_is_neither_admitted_nor_refused() -> None:
    fence = Fence()
    assert fence.check("a", 0) is Verdict.UNHEARD_OF
    fence.learn(1, ["a"])
    assert fence.check("b", 2) is Verdict.UNHEARD_OF
    assert fence.check("a", 99) is Verdict.UNHEARD_OF


def test_outdated_news_changes_nothing() -> None:
    fence = Fence()
    fence.learn(3, ["a"])
    assert fence.learn(2, ["b"]) == Change()
    assert (fence.generation, fence.members) == (3, frozenset("a"))


def test_members_that_departed_first_are_forgotten_first(monkeypatch) -> None:
    monkeypatch.setattr(fence_module, "REMEMBERED", 2)
    fence = Fence()
    fence.learn(1, "abcd")
    fence.learn(2, "bcd")
    assert fence.learn(3, "d").forgotten == frozenset("a")
    assert fence.learn(4, "da") == Change(joined=frozenset("a"))
    assert fence.evicted == {"b": 4, "c": 4}


def test_members_known_to_another_server_as_evicted_are_fenced_off_here() -> None:
    fence = Fence.restored(generation=5, members="ab", evicted={"b": 4, "x": 5})
    fence.remember(
        Fence.restored(generation=4, members="abc", evicted={"b": 2, "y": 3, "x": 1, "a": 3})
    )
    assert fence.evicted == {"y": 3, "a": 3, "c": 5, "b": 4, "x": 5}
    assert list(fence.evicted)[-2:] == ["b", "x"]  # the oldest are forgotten first


@given(
    st.lists(st.frozensets(st.sampled_from("abcd")), min_size=1, max_size=12),
    st.sampled_from("abcd"),
    st.integers(0, 14),
)
def test_admitted_caller_has_been_a_member_since_its_generation(history, member, spoken) -> None:
    fence = Fence()
    for number, members in enumerate(history, start=1):
        fence.learn(number, members)
    try:
        verdict = fence.check(member, spoken)
    except StaleGenerationError:
        admitted = False
    else:
        admitted = verdict is Verdict.ADMITTED
    # Before its first generation a member has sent nothing, so requests for earlier generations are
    # harmless.
    joined = next(
        (number for number, members in enumerate(history, start=1) if member in members),
        len(history) + 1,
    )
    if spoken <= len(history):
        in_since = member in history[-1] and all(
            member in members for members in history[max(spoken, joined) - 1 :]
        )
        assert admitted is in_since
    else:
        assert not admitted
