"""Decides whether a warm process can run a command, based on the command, the environment and the
text of the script. Does not import or run any part of the command."""

from __future__ import annotations

import ast
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

_NO_TORCH: Final = {*sys.stdlib_module_names, "shoal_common", "shoal_protos"}
"""Names of packages that do not import torch."""
_FOLLOWED: Final = (
    "COVERAGE_PROCESS_START",
    "COVERAGE_PROCESS_CONFIG",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "PYTHONINSPECT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
"""Variables of tools that instrument a program from its first instruction on."""
_READ_BY_IMPORTS: Final = (
    *("AOT", "ATEN_", "CUBLAS_", "DNNL_", "GOMP_", "GRPC_", "INDUCTOR_", "KINETO_", "KMP_", "LD_"),
    *(
        "MALLOC_",
        "MKL_",
        "NPY_",
        "NUMEXPR_",
        "NUMPY_",
        "OMP_",
        "ONEDNN_",
        "OPENBLAS_",
        "OTEL_PYTHON_",
    ),
    *("PARTITIONER_", "PROMETHEUS_", "PROTOCOL_BUFFERS_", "PYDANTIC_", "PYTHON", "PYTORCH_"),
    *("SYMPY_", "TMPDIR", "TORCH", "TRITON_", "prometheus_"),
)
"""Prefixes of environment variables that torch, Shoal and their dependencies read on import."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Decision on whether workers of a command are forked from a warm process."""

    warm: bool
    reason: str = ""
    """Reason why workers are not forked, if a user may expect that they are; otherwise empty."""


def judge(command: Sequence[str], environment: Mapping[str, str]) -> Verdict:
    """Decides whether workers with this command line and environment can be forked."""
    if (
        tuple(command[:2]) != (sys.executable, "-u")
        or len(command) < 3
        or (command[2] == "-m" and len(command) < 4)
    ):
        return Verdict(warm=False)
    if followed := next((name for name in _FOLLOWED if environment.get(name)), None):
        return Verdict(warm=False, reason=f"{followed} is set")
    source = _module_file(command[3]) if command[2] == "-m" else Path(command[2])
    if source is None:
        return Verdict(warm=True)
    if not source.is_file():  # reading a pipe here would consume the worker's input
        return Verdict(warm=False)
    if command[2] != "-m" and (command[2].endswith(".pyc") or zipfile.is_zipfile(command[2])):
        return Verdict(warm=False)
    try:
        tree = _parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # a fresh interpreter reports the error better, or may be able to compile the script
        return Verdict(warm=False)
    if all(name in _NO_TORCH for name in _imports(tree)):
        return Verdict(warm=False)  # without an import of torch, forking would save no time
    if setting := next(
        (name for name in _settings(tree) if name.startswith(_READ_BY_IMPORTS)), None
    ):
        return Verdict(
            warm=False,
            reason=f"{source} sets {setting}, which has an effect only before torch is imported",
        )
    return Verdict(warm=True)


def folder_of(command: Sequence[str]) -> str:
    """Returns the first entry that a fresh interpreter would add to sys.path for a command; empty
    if none."""
    if command[1] == "-P":
        return ""
    return str(Path.cwd()) if command[2] == "-m" else str(Path(command[2]).resolve().parent)


def _module_file(name: str) -> Path | None:
    """Returns the source file of `python -m name`; None if it cannot be found without running
    code."""
    path = [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if path:
        spec = PathFinder.find_spec(f"{name}.__main__", path)
    return (
        Path(spec.origin)
        if spec is not None and spec.origin and spec.origin.endswith(".py")
        else None
    )


def _parse(source: Path) -> ast.AST:
    with warnings.catch_warnings():
        # the worker itself will emit warnings about the script's syntax
        warnings.simplefilter("ignore")
        return ast.parse(source.read_bytes())


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yields the top-level names of imported modules; an empty name stands for a relative or
    dynamic import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and _name(node.func) in (
            "import_module",
            "__import__",
            "run_path",
            "run_module",
        ):
            yield ""


def _settings(tree: ast.AST) -> Iterator[str]:
    """Yields the names of the environment variables that a script sets."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and _name(node.value) == "environ"
        ):
            yield from _texts(node.slice)
        elif isinstance(node, ast.AugAssign) and _name(node.target) == "environ":
            yield from _texts(*node.value.keys) if isinstance(node.value, ast.Dict) else ()
        elif isinstance(node, ast.Call) and _name(node.func) in ("setdefault", "update", "putenv"):
            for argument in node.args[:1]:
                yield from (
                    _texts(*argument.keys) if isinstance(argument, ast.Dict) else _texts(argument)
                )
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def _name(node: ast.AST) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _texts(*nodes: ast.AST | None) -> Iterator[str]:
    yield from (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
