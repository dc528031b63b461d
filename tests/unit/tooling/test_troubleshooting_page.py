"""docs/troubleshooting.md has exactly one entry for each reason that an error of Shoal can carry.

The reasons are extracted from the code. An error whose reason has an unknown form fails the test,
too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from shoal_ps_server.consistency.clocks import ConsistencyMode

_ROOT: Final = Path(__file__).parents[3]
_PACKAGES: Final = (
    "common/shoal_common",
    "coordinator/shoal_coordinator",
    "ps_server/shoal_ps_server",
    "worker/shoal_worker",
    "sdk/shoal",
)
_PAGE: Final = (_ROOT / "docs/troubleshooting.md").read_text()
_ENTRY: Final = re.compile(r"^- (\*\*`\w+`\*\*(?:, \*\*`\w+`\*\*)*) (.*)$", re.MULTILINE)
_REASON: Final = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")

_MADE: Final = {
    "f'{self._mode.upper()}_WAIT_TIMEOUT'": {
        f"{mode.value.upper()}_WAIT_TIMEOUT"
        for mode in ConsistencyMode
        if mode is not ConsistencyMode.ASP
    }
}
"""Reasons that are computed."""
_PASSED_ON: Final = {
    ("common/shoal_common/rpc/status.py", "reason"),  # of a status received by gRPC
    # a Refusal: why a member was evicted
    ("coordinator/shoal_coordinator/membership/members/leaving.py", "refusal"),
    # a Refusal: of which run a process is not
    ("coordinator/shoal_coordinator/membership/runs.py", "reason"),
    # a Refusal: why a coordinator has ended
    ("coordinator/shoal_coordinator/service/jobs.py", "reason"),
    ("worker/shoal_worker/checkpoint/saving.py", "found['reason']"),  # of the rank that reads
    # of another rank that writes
    ("worker/shoal_worker/checkpoint/writer.py", "each['reason'] or None"),
}
"""Places where a variable has the reason of another error or a member of Refusal."""
_GRPCS_OWN: Final = {"UNIMPLEMENTED"}
"""Names of gRPC's statuses that Shoal has no class for, and that users may see."""


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """Returns the modules of all packages by path."""
    files = [file for package in _PACKAGES for file in sorted((_ROOT / package).rglob("*.py"))]
    return {str(file.relative_to(_ROOT)): ast.parse(file.read_text()) for file in files}


def _own_constants(module: ast.Module) -> dict[str, str]:
    """Returns the module's own string constants."""
    found = {}
    for node in module.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = node.value if isinstance(node, ast.AnnAssign | ast.Assign) else None
        if (
            isinstance(target, ast.Name)
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            found[target.id] = value.value
    return found


def _constants(module: ast.Module) -> dict[str, str]:
    """Returns the string constants that can be used in the module: its own and imported ones."""
    found = _own_constants(module)
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            file = f"/{node.module.replace('.', '/')}.py"
            there = next(
                (_own_constants(each) for path, each in _modules().items() if path.endswith(file)),
                {},
            )
            found |= {
                each.asname or each.name: there[each.name]
                for each in node.names
                if each.name in there
            }
    return found


def _given(module: ast.Module) -> Iterator[ast.expr]:
    """Yields the reasons of errors: `reason=` where an error is made, and `default_reason` in its
    class."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield from (
                each.value
                for each in node.keywords
                if each.arg == "reason" and _makes_an_error(ast.unparse(node.func), each.value)
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(
                isinstance(target, ast.Name) and target.id == "default_reason" for target in targets
            ):
                yield node.value


def _makes_an_error(kind: str, value: ast.expr) -> bool:
    """Returns whether the call makes an error. Other calls use `reason=` for why a member leaves or
    is drained, and for the origin of a part of a model."""
    constant = (
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and _REASON.fullmatch(value.value)
    )
    return (
        bool(constant)
        or re.search(r"(Error|MembershipChanged|\bkind|\btype\(error\)|_class_of\(.*\))$", kind)
        is not None
    )


def _reasons(value: ast.expr, constants: dict[str, str], file: str) -> set[str]:
    """Returns the reasons that an expression can have, or an empty set if it passes on that of
    another error. Raises LookupError for an unknown form."""
    text = ast.unparse(value)
    match value:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.IfExp(body=body, orelse=orelse):
            return _reasons(body, constants, file) | _reasons(orelse, constants, file)
        case ast.Attribute(value=ast.Name(id="Refusal"), attr=name):
            return {name}
        case ast.Attribute(attr="reason"):
            return set()
        case ast.Name(id=name) if name in constants:
            return {constants[name]}
    if text in _MADE:
        return _MADE[text]
    if (file, text) in _PASSED_ON:
        return set()
    raise LookupError(f"{file}: reason={text}")


def _refusals() -> set[str]:
    """Returns the members of `Refusal` that the coordinator uses."""
    return {
        node.attr
        for module in _modules().values()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Refusal"
    }


def _given_in(module: ast.Module, file: str = "") -> set[str]:
    given = list(_given(module))
    constants = _constants(module) if given else {}
    return {reason for value in given for reason in _reasons(value, constants, file)}


@functools.cache
def _in_code() -> frozenset[str]:
    return frozenset().union(
        *(_given_in(module, file) for file, module in _modules().items()), _refusals(), _GRPCS_OWN
    )


def _on_page() -> list[str]:
    return [
        reason
        for names, _ in _ENTRY.findall(_PAGE.partition("\n## Reasons\n")[2])
        for reason in re.findall(r"`(\w+)`", names)
    ]


def test_each_reason_in_the_code_has_an_entry() -> None:
    assert len(_in_code()) > 150
    assert sorted(_in_code() - set(_on_page())) == []


def test_page_has_no_reason_that_the_code_lacks() -> None:
    assert sorted(set(_on_page()) - _in_code()) == []


def test_each_reason_has_one_entry() -> None:
    assert {reason: count for reason, count in Counter(_on_page()).items() if count > 1} == {}


def test_reasons_are_upper_case_and_fit_an_error_info() -> None:
    assert [
        reason for reason in _in_code() if not _REASON.fullmatch(reason) or len(reason) > 63
    ] == []


def test_every_entry_of_the_list_has_the_expected_form() -> None:
    listed = [
        line for line in _PAGE.partition("\n## Reasons\n")[2].splitlines() if line.startswith("-")
    ]
    assert [line for line in listed if not _ENTRY.fullmatch(line)] == []


def test_page_names_no_unlisted_reason_anywhere() -> None:
    """No part of the page names an unknown reason. Other upper-case names on it are those of
    variables or files."""
    known = set(_on_page()) | {
        name
        for name in re.findall(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b", _PAGE)
        if name.startswith(_VARIABLES)
    }
    assert sorted(set(re.findall(r"`([A-Z]+(?:_[A-Z0-9]+)+)`", _PAGE)) - known) == []


_VARIABLES: Final = ("SHOAL_", "CUDA_", "GLOO_", "OMP_", "XDG_")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise PreconditionError('x', reason='A_B')", {"A_B"}),
        ("raise PreconditionError('x', reason=Refusal.JOB_UNKNOWN)", {"JOB_UNKNOWN"}),
        ("raise PreconditionError('x', reason='NEWER' if a > b else 'OLDER')", {"NEWER", "OLDER"}),
        ("_WHY: Final = 'A_B'\nraise errors.PreconditionError('x', reason=_WHY)", {"A_B"}),
        ("class OwnError(DeadlineError):\n    default_reason = 'A_B'", {"A_B"}),
        (
            "class LostError(StateLostError):\n    def __init__(self):\n        "
            "super().__init__('x', reason='A_B')",
            {"A_B"},
        ),
        ("raise kind(str(error), reason=error.reason)", set()),
        ("client.stop_job('job', reason='asked to')", set()),
    ],
)
def test_each_form_of_giving_a_reason_is_found(source: str, expected: set[str]) -> None:
    assert _given_in(ast.parse(source)) == expected


def test_reasons_in_an_unknown_form_are_not_overlooked() -> None:
    with pytest.raises(LookupError, match=re.escape("reason=look_up(error)")):
        _given_in(ast.parse("raise PreconditionError('x', reason=look_up(error))"))


def _anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings as GitHub generates them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_link_of_the_page_resolves() -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]*)\)", _PAGE)]
    assert len(links) > 20
    for file, _, anchor in links:
        target = (_ROOT / "docs" / file) if file else _ROOT / "docs/troubleshooting.md"
        assert target.exists(), file
        assert not anchor or anchor in _anchors(target.read_text()), f"{file}#{anchor}"
