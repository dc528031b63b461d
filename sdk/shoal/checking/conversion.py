"""Converts a plain training script for `shoal init --from`. Pure.

Makes only changes that are certain to be correct. Findings of `shoal check` in the result are
marked with comments. The loop is converted if it has this shape, in one block of the script:

    loader = DataLoader(...)
    optimizer = torch.optim.X(model.parameters(), ...)  # also filtered, or in groups
    for epoch in range(n):
        for batch in loader:
            ...
            loss.backward()
            optimizer.step()

The block may be the body of `if __name__ == "__main__":`.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from shoal.checking.loaders import DATA_LOADERS
from shoal.checking.rules import EARLY_AVERAGE, Finding, averages, check
from shoal.checking.script import Loop, Script, same_code
from shoal.checking.steps import accumulating_loops, created_optimizers

MARK: Final = "# shoal: "
_OTHER_LIBRARIES: Final = {
    "torch.distributed": "migration/ddp.md",
    "torch.nn.parallel": "migration/ddp.md",
    "torch.nn.DataParallel": "migration/ddp.md",
    "accelerate": "migration/accelerate.md",
    "deepspeed": "migration/deepspeed.md",
    "lightning": "migration/trainers.md",
    "pytorch_lightning": "migration/trainers.md",
    "transformers.Trainer": "migration/trainers.md",
    "trl": "guides/trl.md",
}
"""Libraries that already distribute a script, and their pages in docs."""
_BY_EPOCHS: Final = (
    "`for epoch in loader.epochs(n):` and inside it `for batch in loader:`, where loader is a "
    "shoal.ElasticDataLoader"
)
_BY_STEPS: Final = (
    "`for epoch in loader.epochs(max_steps=n):` for n steps, or `loader.epochs(n)` for n epochs, "
    "and inside it `for batch in loader:`, where loader is a shoal.ElasticDataLoader; "
    "loader.global_step counts the steps"
)
_NOT_RANGE: Final = "the training loop is not `for ... in range(n)`"
_LIMITS: Final = (
    "for a limit of n steps, `for epoch in loader.epochs(max_steps=n):`; other conditions may only "
    "use values that are equal on all ranks, such as loader.global_step or a result of "
    "shoal.all_reduce"
)
_STOPS: Final = (
    "`if optimizer.should_early_stop(loss, patience=5): break`, where loss is a result of "
    "shoal.evaluate; other conditions may only use values that are equal on all ranks"
)
_NOT_DEALT: Final = frozenset({"sampler", "batch_sampler", "worker_init_fn"})
"""Arguments of a DataLoader that the user has to check."""


_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Result of converting a script."""

    source: str
    changes: int
    """Number of places that were changed."""
    marks: int
    """Number of comments inserted to mark remaining work for the user."""
    obstacles: tuple[str, ...]
    """Reasons why the training loop was left unchanged, by line; empty if it was converted."""


class _Unclear(Exception):
    """A reason why the training loop cannot be converted."""

    def __init__(self, what: str, node: ast.AST | None = None, *, remedy: str = "") -> None:
        """`what`: why the loop cannot be converted. `node`: statement above which the problem is
        marked. `remedy`: what to write instead."""
        line = getattr(node, "lineno", None)
        super().__init__(f"line {line}: {what}" if line else what)
        self.line = line or 0
        self.marks = (
            (Finding(line=line, what=f"not converted: {what}", remedy=remedy),)
            if line and remedy
            else ()
        )


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A training loop that can be converted, and the statements around it."""

    first_import: ast.stmt
    block: list[ast.stmt]
    model: str
    optimizer: str
    made: ast.stmt
    """Statement that creates the optimizer."""
    loader: str
    loader_call: ast.Call
    epochs: ast.For
    backward: ast.stmt
    loss: str
    """Name of the loss; empty if the loss has no name."""
    step: ast.stmt
    scheduler: ast.stmt | None
    """Statement with a scheduler's step, directly below `step`; None if there is none."""


def convert(source: str, name: str = "<script>") -> Conversion | None:
    """Converts a training script. Returns None if the script has no training loop.

    Raises SyntaxError.
    """
    found = check(source, name)
    if found is None:
        return None
    script = Script(source, name)
    edits = _Edits(source)
    obstacles: list[_Unclear] = []
    shape = _find_shape(script, obstacles)
    if shape is not None:
        _convert_loop(script, shape, found, edits)
    converted = edits.apply()
    left = tuple(mark for obstacle in obstacles for mark in obstacle.marks)
    marked, marks = _marked(converted, name, left)
    return Conversion(
        source=marked,
        changes=edits.count,
        marks=marks,
        obstacles=tuple(map(str, sorted(obstacles, key=lambda each: each.line))),
    )


# -------------------------------------------------------------------------- structure of the script


def _find_shape(script: Script, obstacles: list[_Unclear]) -> _Shape | None:
    """Returns the training loop and its parts. If the loop cannot be converted, adds each reason to
    `obstacles` and returns None."""

    def attempt(find: Callable[[], _Found]) -> _Found | None:
        try:
            return find()
        except _Unclear as reason:
            obstacles.append(reason)
            return None

    epochs = attempt(lambda: _epochs(script))
    if epochs is None:
        return None
    block, own = _block(script, epochs)
    attempt(lambda: _check_range(epochs))
    attempt(lambda: _check_scope(script, epochs))
    first_import = attempt(lambda: _first_import(script))
    inner = attempt(lambda: _batches(script, epochs))
    if inner is None:
        return None
    obstacles += _exits(script, epochs, inner)
    backward = attempt(lambda: _backward(script, inner))
    step = attempt(lambda: _step(script, inner))
    scheduler = attempt(lambda: _scheduler(script, inner, step[1])) if step else None
    optimizer = attempt(lambda: _optimizer(script, block, step[0] if step else None))
    loader = attempt(lambda: _loader(script, block, inner))
    if step and backward and inner.body.index(step[1]) < inner.body.index(backward[0]):
        obstacles.append(_Unclear("the optimizer's step comes before backward()", step[1]))
    made = [optimizer[0]] if optimizer else []
    for created in (*made, *([script.statement(loader[1])] if loader else [])):
        if block.index(created) > block.index(epochs):
            obstacles.append(_Unclear("it is created after the training loop", created))
        elif created not in own:
            obstacles.append(_Unclear("it is created outside of the block of the loop", created))
    if optimizer and loader:
        attempt(lambda: _check_names(script, block, optimizer, inner, loader[0]))
    own_lines = (*made, backward and backward[0], step and step[1], scheduler)
    obstacles += [
        _Unclear("the line has more than one statement", whole)
        for whole in own_lines
        if whole and not _has_lines_of_its_own(script, whole)
    ]
    if obstacles or not (first_import and backward and step and optimizer and loader):
        return None
    return _Shape(
        first_import=first_import,
        block=block,
        model=optimizer[2],
        optimizer=step[0],
        made=optimizer[0],
        loader=loader[0],
        loader_call=loader[1],
        epochs=epochs,
        backward=backward[0],
        loss=backward[1],
        step=step[1],
        scheduler=scheduler,
    )


def _epochs(script: Script) -> ast.For:
    """Returns the only training loop of the script. Raises _Unclear if there are several loops, if
    the loop is not a `for` loop, or if Shoal or another library already distributes the
    training."""
    used = {script.full_name(node) for node in script.of_type(ast.Name, ast.Attribute)}
    for imported in script.of_type(ast.Import, ast.ImportFrom):
        module = [imported.module or ""] if isinstance(imported, ast.ImportFrom) else []
        used.update(module or [alias.name for alias in imported.names])
    for library, page in _OTHER_LIBRARIES.items():
        if script.imports(library) or any(f"{each}.".startswith(f"{library}.") for each in used):
            raise _Unclear(f"the script uses {library}; see docs/{page}")
    if script.imports("shoal"):
        raise _Unclear("the script already uses Shoal")
    loops = script.training_loops()
    if len(loops) != 1:
        raise _Unclear(f"the script has {len(loops)} training loops", loops[1] if loops else None)
    if not isinstance(loops[0], ast.For):
        raise _Unclear(_NOT_RANGE, loops[0], remedy=_BY_STEPS)
    return loops[0]


def _check_range(epochs: ast.For) -> None:
    looped = epochs.iter
    if (
        not isinstance(looped, ast.Call)
        or ast.unparse(looped.func) != "range"
        or any(isinstance(each, ast.Starred) for each in looped.args)
    ):
        raise _Unclear(_NOT_RANGE, epochs, remedy=_BY_EPOCHS)
    if len(looped.args) == 2 and not isinstance(looped.args[0], ast.Constant):
        start, end = map(ast.unparse, looped.args)
        raise _Unclear(
            f"range({start}, {end}): shoal.resume restores the epoch, so loop over "
            f"loader.epochs({end})",
            epochs,
            remedy=f"shoal.resume(directory) before the loop, without `{start}`, and {_BY_EPOCHS}",
        )
    if len(looped.args) != 1:
        raise _Unclear(_NOT_RANGE, epochs, remedy=_BY_EPOCHS)


def _block(script: Script, epochs: ast.For) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Returns two lists: the statements of the loop's scope, and the statements of the innermost
    block that contains the loop. In the first list, each statement around the loop is replaced by
    the statements in its body."""
    scope = script.scope(epochs)
    own = script.tree.body if scope is None else scope.body
    block = [*own]
    around = {epochs, *script.above(epochs)}
    while epochs not in own:
        outer = next(each for each in own if each in around)
        own = next(
            inner
            for _, inner in ast.iter_fields(outer)
            if isinstance(inner, list) and around & {*inner}
        )
        at = block.index(outer)
        block[at : at + 1] = own
    return block, own


def _check_scope(script: Script, epochs: ast.For) -> None:
    scope = script.scope(epochs)
    outer = next(script.above(epochs))
    guarded = (
        isinstance(outer, ast.If)
        and outer in script.tree.body
        and epochs in outer.body
        and ast.unparse(outer.test) == "__name__ == '__main__'"
    )
    if not guarded and outer is not (script.tree if scope is None else scope):
        raise _Unclear("the loop over epochs is inside another statement", epochs)
    if scope is not None and scope not in script.unguarded_scopes:
        raise _Unclear(
            f"the loop is in {scope.name}(), which may not be called on every rank", scope
        )


def _batches(script: Script, epochs: ast.For) -> ast.For:
    inner = [part for part in epochs.body if isinstance(part, Loop) and script.trains(part)]
    if len(inner) != 1:
        raise _Unclear(
            f"expected one loop over batches directly inside it, found {len(inner)}",
            epochs,
            remedy="" if inner else _BY_STEPS,
        )
    if not isinstance(inner[0], ast.For):
        raise _Unclear("the loop over batches is not a `for`", inner[0], remedy=_BY_STEPS)
    return inner[0]


def _exits(script: Script, epochs: ast.For, inner: ast.For) -> Iterator[_Unclear]:
    for node in ast.walk(epochs):
        if isinstance(node, ast.Break | ast.Continue | ast.Return):
            yield _Unclear(
                "the training loop has a break, continue or return",
                node,
                remedy=_LIMITS if inner in script.above(node) else _STOPS,
            )


def _first_import(script: Script) -> ast.stmt:
    for part in script.tree.body:
        if isinstance(part, ast.Import) or (
            isinstance(part, ast.ImportFrom) and part.module != "__future__"
        ):
            return part
    raise _Unclear("the script has no top-level import")


def _has_lines_of_its_own(script: Script, node: ast.stmt) -> bool:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    before = script.lines[node.lineno - 1].encode()[: node.col_offset]
    after = script.lines[end_line - 1].encode()[end_column:].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def _method_calls(script: Script, method: str) -> list[ast.Call]:
    return [
        call
        for call in script.calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr == method
    ]


def _backward(script: Script, inner: ast.For) -> tuple[ast.stmt, str]:
    calls = _method_calls(script, "backward")
    statement = script.statement(calls[0]) if calls else inner
    if (
        len(calls) != 1
        or statement not in inner.body
        or not isinstance(statement, ast.Expr)
        or statement.value is not calls[0]
    ):
        raise _Unclear(
            "expected one unconditional backward() directly in the loop over batches",
            statement,
        )
    of = calls[0].func
    assert isinstance(of, ast.Attribute)
    return statement, of.value.id if isinstance(of.value, ast.Name) else ""


def _step(script: Script, inner: ast.For) -> tuple[str, ast.stmt]:
    """Returns the name of the optimizer, and the statement that performs its step."""
    for loop, branch in accumulating_loops(script):
        if loop is inner:
            raise _Unclear(
                "gradients accumulate over several batches: docs/guides/accumulation.md", branch
            )
    names = {ast.unparse(each.targets[0]) for each in created_optimizers(script)}
    calls = [
        call
        for call in _method_calls(script, "step")
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in names
    ]
    statement = script.statement(calls[0]) if calls else inner
    if (
        len(calls) != 1
        or calls[0].args
        or calls[0].keywords
        or statement not in inner.body
        or not isinstance(statement, ast.Expr)
        or statement.value is not calls[0]
    ):
        raise _Unclear(
            "expected one unconditional optimizer.step() without arguments directly in the loop "
            "over batches",
            statement,
        )
    function = calls[0].func
    assert isinstance(function, ast.Attribute)
    return ast.unparse(function.value), statement


def _scheduler(script: Script, inner: ast.For, step: ast.stmt) -> ast.stmt | None:
    """Returns the statement of the scheduler's step, which must be directly below the optimizer's
    step; None if there is none."""
    others = [
        script.statement(call)
        for call in _method_calls(script, "step")
        if inner in script.above(call) and script.statement(call) is not step
    ]
    if not others:
        return None
    below = inner.body[inner.body.index(step) + 1 :][:1]
    if others != below or others[0].lineno != others[0].end_lineno:
        raise _Unclear("expected a scheduler's step directly after the optimizer's", others[0])
    return others[0]


def _optimizer(
    script: Script, block: list[ast.stmt], name: str | None
) -> tuple[ast.stmt, str, str]:
    """Returns the statement that creates the optimizer, and the names of the optimizer and of its
    model. `name`: name of the optimizer in the loop; None if it is unknown."""
    made = created_optimizers(script)
    names = [ast.unparse(target) for each in made for target in each.targets]
    if (
        len(made) != 1
        or made[0] not in block
        or names != [name or names[0]]
        or not names[0].isidentifier()
    ):
        raise _Unclear(
            "expected one optimizer of torch.optim, created in the same block as the loop",
            made[-1] if made else None,
        )
    assert isinstance(made[0].value, ast.Call)
    models = _models(block, made[0].value)
    if len(models) != 1:
        raise _Unclear(
            f"{names[0]} is not created from the parameters of one model, as model.parameters()",
            made[0],
        )
    return made[0], names[0], models.pop()


def _models(
    block: list[ast.stmt], created: ast.expr, followed: frozenset[str] = frozenset()
) -> set[str]:
    """Returns the names of the models whose parameters an expression uses.

    The expression may use the parameters of a submodule, filter them or group them. A name that the
    block assigns exactly once is replaced by its value. `followed`: names already replaced.
    """
    models: set[str] = set()
    for node in ast.walk(created):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
            of = node.value
            while isinstance(of, ast.Attribute | ast.Subscript):
                of = of.value
            if isinstance(of, ast.Name):
                models.add(of.id)
        elif isinstance(node, ast.Name) and node.id not in followed:
            values = [
                part.value
                for part in block
                if isinstance(part, ast.Assign)
                and [ast.unparse(target) for target in part.targets] == [node.id]
            ]
            if len(values) == 1:
                models |= _models(block, values[0], followed | {node.id})
    return models


def _loader(script: Script, block: list[ast.stmt], inner: ast.For) -> tuple[str, ast.Call]:
    """Returns the name of the loader, and the call that creates it."""
    looped = inner.iter
    if isinstance(looped, ast.Call) and ast.unparse(looped.func) == "enumerate" and looped.args:
        looped = looped.args[0]
    if not isinstance(looped, ast.Name):
        raise _Unclear("the loop over batches is not `for ... in loader`", inner)
    name = looped.id
    made = [
        part
        for part in block
        if isinstance(part, ast.Assign)
        and [ast.unparse(target) for target in part.targets] == [name]
        and isinstance(part.value, ast.Call)
        and script.full_name(part.value.func) in DATA_LOADERS
    ]
    if len(made) != 1:
        raise _Unclear(f"{name} is not a DataLoader created in the same block as the loop", inner)
    call = made[0].value
    assert isinstance(call, ast.Call)
    names = {each.arg for each in call.keywords}
    if len(call.args) > 3 or None in names or names & _NOT_DEALT:
        raise _Unclear(f"{name} has a sampler or worker_init_fn, or may have one", call)
    for use in script.of_type(ast.Name):
        if use.id == name and isinstance(use.ctx, ast.Load) and not _is_read(script, use):
            raise _Unclear(f"{name} is used outside of a `for`, enumerate() or len()", use)
    return name, call


def _is_read(script: Script, use: ast.Name) -> bool:
    parent = next(script.above(use))
    if isinstance(parent, ast.For):
        return parent.iter is use and script.trains(parent)
    return (
        isinstance(parent, ast.Call)
        and use in parent.args
        and ast.unparse(parent.func) in ("len", "enumerate")
    )


def _check_names(
    script: Script,
    block: list[ast.stmt],
    created: tuple[ast.stmt, str, str],
    inner: ast.For,
    loader: str,
) -> None:
    """Checks that the names of model, optimizer and loader each refer to one object, and that no
    other object refers to the model before it is replaced."""
    made, optimizer, model = created
    scope = script.scope(inner)
    made_once = [
        node
        for node in script.of_type(ast.Name)
        if node.id in (optimizer, loader)
        and not isinstance(node.ctx, ast.Load)
        and script.scope(node) is scope
    ]
    if len(made_once) != 2:
        raise _Unclear(f"{optimizer} or {loader} is assigned more than once", made_once[-1])
    later = {node for part in block[block.index(made) + 1 :] for node in ast.walk(part)}
    for rebound in script.of_type(ast.Name):
        bound = rebound.id == model and not isinstance(rebound.ctx, ast.Load)
        if bound and rebound in later and script.scope(rebound) is scope:
            raise _Unclear(f"{model} is assigned again after {optimizer} was created", rebound)
    for shared in script.of_type(ast.Global, ast.Nonlocal):
        if set(shared.names) & {model, optimizer, loader}:
            raise _Unclear("a function assigns the model, the optimizer or the loader", shared)
    copied = {node for call in averages(script) for node in call.args}
    for part in block[: block.index(made)]:
        for node in ast.walk(part):
            if node in copied and ast.unparse(node) == model:
                raise _Unclear(EARLY_AVERAGE, part)
            if _takes_hold(script, node, model) and not _names_again(part, model):
                raise _Unclear(
                    f"other code may keep a reference to {model} from before as_distributed "
                    "replaces it",
                    node,
                )
    if not any(
        isinstance(call, ast.Call) and ast.unparse(call.func) == model for call in ast.walk(inner)
    ):
        raise _Unclear(f"{model}(...) is not called in the loop over batches", inner)


def _takes_hold(script: Script, node: ast.AST, model: str) -> bool:
    """Returns whether a node uses the model itself as a value (as an argument, in an assignment or
    in a container), so that other code may keep a reference to it. Printing the model, or accessing
    one of its attributes or items, does not count."""
    if not isinstance(node, ast.Name) or node.id != model or not isinstance(node.ctx, ast.Load):
        return False
    parent = next(script.above(node))
    printed = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "print"
    part_of_it = isinstance(parent, ast.Attribute) or (
        isinstance(parent, ast.Subscript) and parent.value is node
    )
    return not part_of_it and not printed


def _names_again(part: ast.stmt, model: str) -> bool:
    """Returns whether a statement only rebinds the model's own name, as in `model = f(model)`."""
    return isinstance(part, ast.Assign) and [ast.unparse(each) for each in part.targets] == [model]


# -------------------------------------------------------------------------------------------- edits


class _Edits:
    """Insertions and replacements by position, applied together."""

    def __init__(self, source: str) -> None:
        self._lines = source.encode().split(b"\n")  # columns of ast are bytes
        self._edits: list[tuple[int, int, int, int, bytes]] = []
        self.count = 0

    def indent(self, line: int) -> str:
        """Returns the whitespace at the beginning of a line."""
        text = self._lines[line - 1]
        return text[: len(text) - len(text.lstrip())].decode()

    def before(self, line: int, text: str) -> None:
        self._edits.append((line - 1, 0, len(self._edits), 0, text.encode()))
        self.count += 1

    def below(self, statement: ast.stmt, text: str) -> None:
        """Adds a line below a statement, with the same indentation."""
        end = statement.end_lineno or statement.lineno
        self.before(end + 1, f"{self.indent(statement.lineno)}{text}\n")

    def shift(self, statement: ast.stmt) -> None:
        """Indents a one-line statement by one level."""
        level = b"\t" if self.indent(statement.lineno).endswith("\t") else b"    "
        self._edits.append((statement.lineno - 1, 0, len(self._edits), 0, level))

    def replace(self, node: ast.expr, text: str) -> None:
        assert node.end_lineno == node.lineno
        assert node.end_col_offset is not None
        length = node.end_col_offset - node.col_offset
        self._edits.append(
            (node.lineno - 1, node.col_offset, len(self._edits), length, text.encode())
        )
        self.count += 1

    def enclose(self, node: ast.expr, before: str, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        number = len(self._edits)
        self._edits += [
            (node.lineno - 1, node.col_offset, number, 0, before.encode()),
            (node.end_lineno - 1, node.end_col_offset, number + 1, 0, after.encode()),
        ]
        self.count += 1

    def apply(self) -> str:
        lines = [*self._lines]
        for line, column, _, length, text in sorted(self._edits, reverse=True):
            lines[line] = lines[line][:column] + text + lines[line][column + length :]
        return b"\n".join(lines).decode()


def _convert_loop(script: Script, shape: _Shape, found: list[Finding], edits: _Edits) -> None:
    edits.before(shape.first_import.lineno, "import shoal\n")
    both = f"{shape.model}, {shape.optimizer}"
    edits.below(shape.made, f"{both} = shoal.as_distributed({both})")
    edits.enclose(shape.loader_call, "shoal.ElasticDataLoader.from_dataloader(", ")")
    assert isinstance(shape.epochs.iter, ast.Call)
    edits.replace(shape.epochs.iter.func, f"{shape.loader}.epochs")
    if shape.loss:
        edits.below(shape.backward, f"shoal.report(loss={shape.loss})")
    if shape.scheduler is not None:
        assert isinstance(shape.step, ast.Expr)
        edits.enclose(shape.step.value, "if ", ":")
        edits.shift(shape.scheduler)
    for call in _prints(script, shape, found):
        edits.replace(call.func, "shoal.print_once")


def _prints(script: Script, shape: _Shape, found: list[Finding]) -> Iterator[ast.Call]:
    """Yields the print calls executed by every rank after the model is distributed."""
    later = shape.block[shape.block.index(shape.made) + 1 :]
    inside = {node for part in later for node in ast.walk(part)}
    reported = {finding.line for finding in found if finding.what.startswith("print()")}
    for call in script.calls("print"):
        if (
            call in inside
            and call.lineno in reported
            and script.scope(call) is script.scope(shape.epochs)
        ):
            yield call


# --------------------------------------------------------------------------- comments with findings


def _marked(source: str, name: str, left: tuple[Finding, ...]) -> tuple[str, int]:
    """Inserts a comment with the findings above each statement that has any. Returns the new script
    and the number of comments.

    `left`: problems found during the conversion, in addition to the findings of `check`.
    """
    script = Script(source, name)
    edits = _Edits(source)
    for finding in (*left, *(check(source, name) or ())):
        line = min(
            (
                (end - node.lineno, node.lineno)
                for node in script.of_type(ast.stmt)
                if node.lineno <= finding.line <= (end := node.end_lineno or node.lineno)
            ),
            default=(0, finding.line),  # a decorator
        )[1]
        indent = edits.indent(line)
        text = f"{finding.what}. Instead: {finding.remedy}"
        edits.before(
            line,
            "".join(
                f"{each}\n"
                for each in textwrap.wrap(
                    text,
                    99,
                    initial_indent=f"{indent}{MARK}",
                    subsequent_indent=f"{indent}#     ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            ),
        )
    marked = edits.apply()
    if not same_code(Script(marked, name).tree, script.tree):
        raise AssertionError(f"comments changed {name}")
    return marked, edits.count
