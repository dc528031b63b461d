"""Converts the parts of a script around its training loop for `shoal init --from`. Pure.

Considers only the block of the loop: every rank executes it once, and data workers do not.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.checking.edits import Edits
from shoal.checking.findings import Finding
from shoal.checking.rules import SAVES, placements
from shoal.checking.script import Loop, Script, argument, is_name, last_name, words_in
from shoal.checking.steps import OPTIMIZER_WORDS


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model and its optimizer, which `as_distributed` can replace."""

    model: str
    optimizer: str
    made: ast.stmt
    """Statement that creates the optimizer."""
    averages: list[ast.stmt]
    """Statements that create averages of the model above `made`."""


def blocks(script: Script, loop: Loop) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Returns two lists: the statements of the loop's scope, and the statements of the innermost
    block that contains the loop. In the first list, each statement around the loop is replaced by
    the statements in its body."""
    scope = script.scope(loop)
    own = script.tree.body if scope is None else scope.body
    block = [*own]
    around = {loop, *script.above(loop)}
    while loop not in own:
        outer = next(each for each in own if each in around)
        own = next(
            inner
            for _, inner in ast.iter_fields(outer)
            if isinstance(inner, list) and around & {*inner}
        )
        at = block.index(outer)
        block[at : at + 1] = own
    return block, own


def has_lines_of_its_own(script: Script, node: ast.stmt) -> bool:
    """Returns whether no other statement shares a line with this one."""
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    before = script.lines[node.lineno - 1].encode()[: node.col_offset]
    after = script.lines[end_line - 1].encode()[end_column:].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def convert_rest(
    script: Script, loop: Loop, trained: Trained | None, found: list[Finding], edits: Edits
) -> None:
    """Converts what does not depend on the shape of the training loop: model, device, names in
    state dicts, output, and files written after the loop.

    `trained`: None if `as_distributed` is left to the user. `found`: findings of `check`."""
    imported = first_import(script)
    if imported is None:
        return
    _, own = blocks(script, loop)
    before = edits.count
    if trained is not None:
        _distribute(script, loop, own, trained, edits)
    for device in _devices(script, own):
        edits.replace(device, "shoal.device()")
    reported = {(each.line, each.what.partition("(")[0]) for each in found}
    for call in _in_scope(script, loop, own, script.calls("print", "logging.basicConfig")):
        if (call.lineno, last_name(call)) in reported:
            if last_name(call) == "print":
                edits.replace(call.func, "shoal.print_once")
            else:
                _log_once(call, edits)
    for saving in _savings(script, loop, own, trained):
        assert isinstance(saving.value, ast.Call)
        if (saving.lineno, script.full_name(saving.value.func)) in reported:
            indent = edits.indent(saving.lineno)
            edits.before(saving.lineno, f"{indent}if shoal.is_main_process():\n")
            edits.shift(saving)
    if edits.count > before:
        edits.before(imported.lineno, "import shoal\n")


def _distribute(
    script: Script, loop: Loop, own: list[ast.stmt], trained: Trained, edits: Edits
) -> None:
    """Adds `as_distributed`. Below it, `model.module.state_dict()` has the names of
    `model.state_dict()` above it."""
    both = f"{trained.model}, {trained.optimizer}"
    indent = edits.indent(trained.made.lineno)
    below = [f"{both} = shoal.as_distributed({both})", *map(edits.take, trained.averages)]
    edits.below(trained.made, f"\n{indent}".join(below))
    later = own[own.index(trained.made) + 1 :]
    for call in _in_scope(script, loop, later, script.calls()):
        of = call.func.value if isinstance(call.func, ast.Attribute) else call
        if last_name(call) == "state_dict" and is_name(of, trained.model):
            edits.enclose(of, "", ".module")


def first_import(script: Script) -> ast.stmt | None:
    """Returns the first import at the top level; None if there is none."""
    return next(
        (
            part
            for part in script.tree.body
            if isinstance(part, ast.Import)
            or (isinstance(part, ast.ImportFrom) and part.module != "__future__")
        ),
        None,
    )


def _in_scope(
    script: Script, loop: Loop, block: list[ast.stmt], calls: Iterator[ast.Call]
) -> Iterator[ast.Call]:
    """Yields the calls in statements of a block, except for those in functions."""
    inside = {node for part in block for node in ast.walk(part)}
    return (call for call in calls if call in inside and script.scope(call) is script.scope(loop))


def _devices(script: Script, own: list[ast.stmt]) -> Iterator[ast.expr]:
    """Yields the values of variables that are "cuda" if it is available and "cpu" otherwise, as a
    string or a torch.device, and that the script uses only in ways that suit shoal.device()."""
    for made in own:
        if not (
            isinstance(made, ast.Assign)
            and len(made.targets) == 1
            and isinstance(target := made.targets[0], ast.Name)
        ):
            continue
        chosen, value = made.value, made.value
        is_string = True
        if (
            isinstance(value, ast.Call)
            and script.full_name(value.func) == "torch.device"
            and len(value.args) == 1
            and not value.keywords
        ):
            chosen, is_string = value.args[0], False
        if (
            not isinstance(chosen, ast.IfExp)
            or not isinstance(chosen.test, ast.Call)
            or script.full_name(chosen.test.func) != "torch.cuda.is_available"
            or [ast.unparse(each) for each in (chosen.body, chosen.orelse)] != ["'cuda'", "'cpu'"]
        ):
            continue
        places = {*placements(script, chosen.body)}
        names = [node for node in script.of_type(ast.Name) if node.id == target.id]
        if sum(not isinstance(node.ctx, ast.Load) for node in names) == 1 and all(
            not isinstance(next(script.above(use)), ast.Compare)
            and (not is_string or places & {*itertools.islice(script.above(use), 2)})
            for use in script.uses(target)
        ):
            yield value


def _log_once(call: ast.Call, edits: Edits) -> None:
    """Makes all processes but the main one log only warnings, if the call does not open a file."""
    names = {each.arg: each.value for each in call.keywords}
    level = names.get("level")
    if (
        isinstance(level, ast.Attribute)
        and isinstance(call.func, ast.Attribute)
        and not names.keys() & {None, "filename", "handlers"}
    ):
        module = ast.unparse(call.func.value)
        edits.enclose(level, "", f" if shoal.is_main_process() else {module}.WARNING")


_LOCAL_CALLS: Final = frozenset(
    {"state_dict", "cpu", "detach", "numpy", "tolist", "item", "join", "str", "Path", "dict"}
    | {"items", "removeprefix", "replace"}
)
"""Functions and methods that a single rank may call."""
_READS: Final = frozenset({"load", "load_file", "open", "loadtxt", "read_csv", "from_pretrained"})


def _savings(
    script: Script, loop: Loop, own: list[ast.stmt], trained: Trained | None
) -> Iterator[ast.Expr]:
    """Yields the statements after a training loop that only write a file which the script does not
    read again, and that a single rank can execute."""
    later = own[own.index(loop) + 1 :]
    read = {
        ast.unparse(path)
        for call in script.calls()
        if last_name(call) in _READS and call.lineno > loop.lineno
        for path in (*call.args, *(each.value for each in call.keywords))
    }
    for saving in later:
        if not isinstance(saving, ast.Expr) or not isinstance(call := saving.value, ast.Call):
            continue
        place = SAVES.get(script.full_name(call.func))
        path = argument(call, place, "") if place is not None else None
        if (
            path is not None
            and ast.unparse(path) not in read
            and has_lines_of_its_own(script, saving)
            and all(_is_local(part, trained) for part in ast.walk(call) if part is not call)
        ):
            yield saving


def _is_local(node: ast.AST, trained: Trained | None) -> bool:
    """Returns whether a part of an expression needs no other rank, and can be indented."""
    if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
        return False
    if not isinstance(node, ast.Call):
        return not isinstance(node, ast.Await | ast.NamedExpr | ast.Yield | ast.YieldFrom)
    if last_name(node) == "state_dict":
        # the state of an optimizer is gathered from all ranks
        return trained is not None and not words_in(node.func) & OPTIMIZER_WORDS
    return last_name(node) in _LOCAL_CALLS
