"""Fixtures of this folder, which start the workers of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.fresh import Fresh
from tests.integration.conftest import shell  # noqa: F401 - a fixture
from tests.zygote.children import Zygote

_LIMIT_S = 150
"""Time limit in seconds of a test on a device. The first connection can take most of a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits the time of each test on a device, so that a stuck test fails alone and shows the
    stacks of all threads.

    `timeout_method = "thread"`, which other tests use, would end the whole run. A main thread that
    is stuck in C++ receives no signal; its stack is printed anyway (`faulthandler_timeout` in the
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
    """Returns, for "cpu" or "cuda", a factory of processes that may use this kind of device."""
    fresh = Fresh()
    yield lambda kind: fresh if kind == "cuda" else zygote
    fresh.close()
