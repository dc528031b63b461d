"""Fixtures of this folder, which start the workers of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.fresh import Fresh
from tests.integration.conftest import shell  # noqa: F401 - a fixture
from tests.zygote.children import Zygote

_LIMIT_S = 150
"""Seconds of a test on a device: connecting for the first time takes most of a minute at worst."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has a test that is stuck on a device fail alone, with the stacks of all threads.

    `timeout_method = "thread"`, as for other tests, ends the whole run. A main thread that is stuck
    in C++ hears no signal; its stack is printed all the same (`faulthandler_timeout` in the
    Makefile).
    """
    for item in items:
        if (
            item.get_closest_marker("gpu")
            and not item.get_closest_marker("soak")
            and not item.get_closest_marker("timeout")
        ):
            item.add_marker(pytest.mark.timeout(_LIMIT_S, method="signal"))


@pytest.fixture(scope="session")
def starter(zygote: Zygote, leftover_processes: None) -> Iterator[Callable[[str], Zygote]]:
    """Gives, for "cpu" or "cuda", what starts processes that may use it."""
    fresh = Fresh()
    yield lambda kind: fresh if kind == "cuda" else zygote
    fresh.close()
