"""`import shoal` provides every public name and imports nothing before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import shoal

_ALIASES = {"ElasticOptimizer": "ShardedOptimizer"}
"""Alternative names: the optimizer of every strategy is elastic."""


def checked_imports() -> dict[str, str]:
    """Returns the module of each name that only type checkers import."""
    tree = ast.parse(Path(shoal.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_public_name_exists_under_its_own_name() -> None:
    found = {name: getattr(getattr(shoal, name, None), "__name__", None) for name in shoal.__all__}
    assert found == {name: _ALIASES.get(name, name) for name in shoal.__all__}


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    for name, module in checked_imports().items():
        assert getattr(import_module(module), name) is getattr(shoal, name), name
    assert set(shoal._HOMES) <= set(checked_imports())


def test_the_workers_whole_api_is_public() -> None:
    from shoal_worker import api

    assert set(api.__all__) <= set(shoal.__all__)


def test_all_errors_are_public() -> None:
    from shoal_common import errors

    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ShoalError)
    }
    assert tree <= set(shoal.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'nothing'"):
        _ = shoal.nothing


def test_names_and_version_are_listed() -> None:
    assert set(shoal.__all__) <= set(dir(shoal))
    assert shoal.__version__.count(".") == 2


@pytest.mark.parametrize(
    "statement",
    [
        "import shoal",
        "import shoal.cli",
        "import shoal.cli.app",
        "import shoal.client",
        "import shoal.launcher.run.agent, shoal.launcher.run.standalone",
    ],
)
def test_modules_that_do_not_need_torch_do_not_import_it(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_launcher_starts_workers_before_slow_imports() -> None:
    modules = (
        "shoal.cli.commands.run, shoal.cli.terminal.console, shoal.launcher.run.agent, "
        "shoal.launcher.run.standalone"
    )
    slow = "{'grpc', 'google.protobuf', 'numpy', 'pydantic', 'redis', 'rich', 'torch'}"
    loaded = subprocess.check_output(
        [sys.executable, "-c", f"import sys, {modules}; print({slow} & sys.modules.keys())"],
        text=True,
    )
    assert loaded == "set()\n"
