"""No modules import each other in a cycle, annotations included. The layers in pyproject.toml
ensure the same for packages."""

from __future__ import annotations

import graphlib

import grimp
import pytest


@pytest.mark.parametrize(
    "package", ["shoal_worker", "shoal_coordinator", "shoal_ps_server", "shoal_common", "shoal"]
)
def test_modules_have_no_import_cycles(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # raises CycleError, which names the cycle
    list(graphlib.TopologicalSorter(imports).static_order())
