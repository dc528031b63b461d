"""One zygote for the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.worker_async.async_cluster import Zygote


@pytest.fixture(scope="package")
def zygote(leftover_processes: None) -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()
