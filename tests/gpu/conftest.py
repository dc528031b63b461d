"""What the tests of this folder share: who starts the workers of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.fresh import Fresh
from tests.integration.conftest import shell  # noqa: F401 - a fixture
from tests.zygote.children import Zygote


@pytest.fixture(scope="session")
def starter(zygote: Zygote, leftover_processes: None) -> Iterator[Callable[[str], Zygote]]:
    """Gives, for "cpu" or "cuda", what starts processes that may use it."""
    fresh = Fresh()
    yield lambda kind: fresh if kind == "cuda" else zygote
    fresh.close()
