"""Writes docs/reference/environment.md: every variable that Shoal reads or sets, from the settings'
own fields and docstrings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from types import NoneType
from typing import Any, Final, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from shoal_coordinator.settings import CoordinatorSettings
from shoal_ps_server.settings import PsServerSettings
from shoal_worker.settings import WorkerSettings

_HEADER: Final = """\
# Environment variables

Written from the settings' own fields by `make reference`. A flag of the same name counts before its
variable: [commands](commands.md), where torchrun's `PET_...` are too. A *duration* is a number with
its unit: `30s`, `5m`, `1d`.
"""
_SECTIONS: Final[tuple[tuple[str, str, type[BaseSettings]], ...]] = (
    (
        "Workers",
        "What `import shoal` reads. `shoal run` sets those that say where a worker belongs; "
        "people set timeouts, addresses and credentials for the command that starts the workers, "
        "which inherit them.",
        WorkerSettings,
    ),
    ("The coordinator", "What `shoal-coordinator` reads.", CoordinatorSettings),
    ("Parameter servers", "What `shoal-ps-server` reads.", PsServerSettings),
)
_OTHERS: Final = {
    " ".join(
        (
            "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
            "ROLE_NAME ROLE_WORLD_SIZE",
            "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE",
        )
    ): "set for each worker, with torchrun's meanings. In an elastic job they are those of its "
    "start, and `shoal.rank()` and "
    "`shoal.world_size()` those of now",
    "OMP_NUM_THREADS": "set to 1 for each worker of several on a machine, unless it is set; the "
    "command says so",
    "GLOO_SOCKET_IFNAME "
    "NCCL_SOCKET_IFNAME": "set to the interface of `--local-addr`, unless they are set: "
    "[addresses](../clusters/addresses.md)",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "set to 1 for workers, unless it is set, as torchrun does",
    "MALLOC_* GLIBC_TUNABLES": "where one is set, workers leave glibc's malloc as it is "
    "([why](../explanation/backends.md#memory))",
    "NO_COLOR": "no colours on the terminal",
    "PMI_SIZE OMPI_COMM_WORLD_SIZE": "by which a process sees that `mpiexec` started it",
    "SHOAL_WARM": "0: `shoal run` and `shoal up` start a fresh interpreter for each worker, as "
    "with `--no-warm` "
    "([warm starts](../guides/warm-starts.md))",
    "SHOAL_PREEMPTION_NOTICE": "cloud whose preemption notices `shoal run` follows, as "
    "`--preemption-notice`: auto, aws, gcp, azure or none "
    "([machines that go](../guides/machines.md))",
    "SHOAL_HEALTH_CHECKS": "1: `shoal run` checks the machine, as with `--health-checks` "
    "([health checks](../guides/machines.md#health-checks))",
    "SHOAL_METADATA_URL": "address of the cloud's metadata service, for a proxy or a test: "
    "http://HOST:PORT; by default http://169.254.169.254",
    "SHOAL_HISTORY_RUNS": "ended runs that are kept for `shoal history`, 100 by default; 0 records "
    "nothing ([past runs](../observability.md#past-runs))",
    "SHOAL_HISTORY_MIB": "MiB that they take in all, 1024 by default",
    "SHOAL_FAILPOINTS": "for Shoal's own tests: where a process is to fail",
}


def page() -> str:
    """The whole page."""
    lines = [_HEADER]
    for title, text, settings in _SECTIONS:
        lines += [
            f"## {title}\n",
            f"{text}\n",
            "| variable | | default |",
            "|---|---|---|",
            *_rows(settings),
            "",
        ]
    lines += ["## Others\n", "| variable | |", "|---|---|"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {text} |"
        for names, text in _OTHERS.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _rows(settings: type[BaseSettings]) -> Iterator[str]:
    texts = _docstrings(settings)
    prefix = str(settings.model_config.get("env_prefix", ""))
    for name, field in settings.model_fields.items():
        variable = (
            field.validation_alias
            if isinstance(field.validation_alias, str)
            else f"{prefix}{name.upper()}"
        )
        text = " ".join(texts[name].split()).replace("None:", "unset:").replace("|", "\\|")
        yield f"| `{variable}` | {_kind(field.annotation)}{text} | {_default(field)} |"


def _docstrings(settings: type[BaseSettings]) -> dict[str, str]:
    """The text below each field, of the class and of those that it is made from."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if not kind.__module__.startswith("shoal_"):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = str(after.value.value)
    return found


def _kind(annotation: Any) -> str:
    """A word in front of what a field means, where its values have a form of their own."""
    kinds = [annotation, *get_args(annotation)]
    if bool in kinds:
        return "`1` or `0`. "
    if timedelta in kinds:
        return "A duration. "
    choices = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return " or ".join(f"`{member.value}`" for member in choices[0]) + ". " if choices else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    value = field.default
    if field.default_factory is not None or isinstance(value, NoneType) or value == "":
        return ""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, timedelta):
        return f"`{value.total_seconds():g}s`"
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return f"`{value.value if isinstance(value, Enum) else value}`"
