"""Collecting the tests, which each process of pytest does, imports no package that takes long."""

from __future__ import annotations

import pytest

from tests.collection import IMPORTED


def test_large_packages_are_imported_by_the_tests_that_need_them(
    pytestconfig: pytest.Config,
) -> None:
    assert sorted(pytestconfig.stash[IMPORTED]) == [], "import it in the test, not in its module"
