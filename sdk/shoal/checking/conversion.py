"""Converts a plain training script for `shoal init --from`. Pure.

Makes only changes that are certain to be correct. Findings of `shoal check` in the result are
marked with comments. The loop is converted if it has this shape, in one block of the script:

    loader = DataLoader(...)
    optimizer = torch.optim.X(model.parameters(), ...)  # also filtered, or in groups
    for epoch in range(n):
        for batch in loader:  # also with tqdm or enumerate
            ...
            loss.backward()
            optimizer.step()

The block may be the body of `if __name__ == "__main__":`.

If the loop cannot be converted, the rest of the script is, and the copy ends with an error above
the loop: with `as_distributed`, but a loop that ends by a counter or a loss of its own, ranks could
take different numbers of steps; without it, each rank would train a model of its own. A script that
another library distributes is only commented.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.checking.edits import Edits
from shoal.checking.findings import Finding
from shoal.checking.loaders import DATA_LOADERS, all_loaders
from shoal.checking.rules import BARS, check
from shoal.checking.script import (
    Function,
    Loop,
    Script,
    assigned,
    has_name,
    is_name,
    last_name,
    same_code,
)
from shoal.checking.sources import Sources
from shoal.checking.state import AVERAGED_MODEL, EARLY_AVERAGE, SCHEDULES, averages
from shoal.checking.steps import accumulating_loops, created_optimizers
from shoal.checking.surroundings import (
    Trained,
    blocks,
    convert_rest,
    first_import,
    has_lines_of_its_own,
)

MARK: Final = "# shoal: "
_NANOGPT: Final = "docs/migration/nanogpt.md"
_CLASSIFIER: Final = "docs/migration/classifier.md"
_ACCUMULATION: Final = "docs/guides/accumulation.md"
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
_WRAPPERS: Final = frozenset(name for name in BARS if name.endswith(".tqdm"))
"""Progress bars around an iterable. The others count, like `range`."""

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
    page: str = ""
    """Page that shows how to convert the training loop, if the copy ends with an error above it;
    otherwise empty."""


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
class _Epochs:
    """The epochs of a training loop."""

    number: str
    """Expression for the number of epochs."""
    from_one: bool = False
    """True if the first epoch is number 1."""
    start: str = ""
    """Variable with the number of the first epoch if the script may set it to another value than 0,
    for example when it loads a checkpoint; otherwise empty."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Source of the batches of a training loop."""

    loader: str
    """Name of the DataLoader."""
    call: ast.Call
    """Call that creates it."""
    bars: tuple[ast.Call, ...]
    """Progress bars to remove. Each wraps its first argument."""


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A training loop that can be converted."""

    trained: Trained
    source: _Source
    epochs: ast.For
    counted: _Epochs
    backward: ast.stmt
    loss: str
    """Name of the loss; empty if the loss has no name."""
    step: ast.stmt
    advances: list[ast.stmt]
    """Statements directly below `step` that advance schedulers and averages."""


def convert(source: str, name: str = "<script>") -> Conversion | None:
    """Converts a training script. Returns None if the script has no training loop.

    Raises SyntaxError.
    """
    found = check(source, name)
    if found is None:
        return None
    script = Script(source, name)
    edits = Edits(source)
    obstacles = [*_distributed_already(script)]
    refusals: list[Loop] = []
    shape = None
    if not obstacles:
        shape = _find_shape(script, obstacles)
        if shape is not None:
            convert_rest(script, shape.epochs, shape.trained, found, edits)
            _convert_loop(shape, edits)
        else:
            refusals = script.once(Sources).outer_loops()
            if refusals:
                convert_rest(script, refusals[0], _trained(script, refusals[0]), found, edits)
    pages = [_page(script, loop, obstacles) for loop in refusals]
    for loop, page in zip(refusals, pages, strict=True):
        edits.before(loop.lineno, f"{edits.indent(loop.lineno)}{_refusal_of_loop(page)}\n")
    converted = edits.apply()
    left = [
        replace(mark, line=edits.new_line(mark.line))
        for obstacle in obstacles
        for mark in obstacle.marks
    ]
    left += [
        _finding_of_refusal(edits.new_line(loop.lineno) - 1, page)
        for loop, page in zip(refusals, pages, strict=True)
    ]
    if shape is not None and shape.counted.start:
        left = [_own_resuming(converted, shape.counted.start)]
    marked, marks = _marked(converted, name, left)
    return Conversion(
        source=marked,
        changes=edits.count,
        marks=marks,
        obstacles=tuple(map(str, sorted(obstacles, key=lambda each: each.line))),
        page=pages[0] if pages else "",
    )


def _distributed_already(script: Script) -> Iterator[_Unclear]:
    """Yields the reason for not converting a script that Shoal or another library distributes."""
    used = {script.full_name(node) for node in script.of_type(ast.Name, ast.Attribute)}
    for imported in script.of_type(ast.Import, ast.ImportFrom):
        module = [imported.module or ""] if isinstance(imported, ast.ImportFrom) else []
        used.update(module or [alias.name for alias in imported.names])
    for library, page in _OTHER_LIBRARIES.items():
        if script.imports(library) or any(f"{each}.".startswith(f"{library}.") for each in used):
            yield _Unclear(f"the script uses {library}; see docs/{page}")
            return
    if script.imports("shoal"):
        yield _Unclear("the script already uses Shoal")


def _page(script: Script, loop: Loop, obstacles: list[_Unclear]) -> str:
    """Returns the page that shows how to convert a loop of this kind. `obstacles`: reasons why it
    was not converted."""
    loaders = script.once(all_loaders)
    executed = script.once(Sources).executed_by[loop]
    over_loader = any(isinstance(part, ast.For) and loaders.of(part.iter) for part in executed)
    if not over_loader or not isinstance(loop, ast.For):
        return _NANOGPT
    only_accumulates = all(str(each).endswith(_ACCUMULATION) for each in obstacles)
    return _CLASSIFIER if any(averages(script)) or not only_accumulates else _ACCUMULATION


def _refusal_of_loop(page: str) -> str:
    return f'raise SystemExit("the training loop below is not converted yet: {page}")'


def _finding_of_refusal(line: int, page: str) -> Finding:
    return Finding(
        line=line,
        what="the script ends here, because the loop below is not converted",
        remedy=f"convert the loop as in {page}, then remove this line",
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
    block, own = blocks(script, epochs)
    counted = attempt(lambda: _counted(script, block, epochs))
    attempt(lambda: _check_scope(script, epochs))
    if first_import(script) is None:
        obstacles.append(_Unclear("the script has no top-level import"))
    inner = attempt(lambda: _batches(script, epochs))
    if inner is None:
        return None
    obstacles += _exits(script, epochs, inner)
    backward = attempt(lambda: _backward(script, inner))
    step = attempt(lambda: _step(script, inner))
    advances = (attempt(lambda: _advances(script, inner, step[1])) if step else None) or []
    optimizer = attempt(lambda: _optimizer(script, block, step[0] if step else None))
    source = attempt(lambda: _source(script, block, epochs, inner))
    if step and backward and inner.body.index(step[1]) < inner.body.index(backward[0]):
        obstacles.append(_Unclear("the optimizer's step comes before backward()", step[1]))
    made = [optimizer[0]] if optimizer else []
    for created in (*made, *([script.statement(source.call)] if source else [])):
        if block.index(created) > block.index(epochs):
            obstacles.append(_Unclear("it is created after the training loop", created))
        elif created not in own:
            obstacles.append(_Unclear("it is created outside of the block of the loop", created))
    early = _early_averages(script, block, own, optimizer) if optimizer else []
    if optimizer and source:
        attempt(lambda: _check_names(script, block, optimizer, inner, source.loader, early))
        attempt(lambda: _check_called(optimizer[2], inner))
    own_lines = (*made, backward and backward[0], step and step[1], *advances)
    obstacles += [
        _Unclear("the line has more than one statement", whole)
        for whole in own_lines
        if whole and not has_lines_of_its_own(script, whole)
    ]
    if obstacles or not (counted and backward and step and optimizer and source):
        return None
    return _Shape(
        trained=Trained(model=optimizer[2], optimizer=step[0], made=optimizer[0], averages=early),
        source=source,
        epochs=epochs,
        counted=counted,
        backward=backward[0],
        loss=backward[1],
        step=step[1],
        advances=advances,
    )


def _trained(script: Script, loop: Loop) -> Trained | None:
    """Returns the model and the optimizer of a loop that cannot be converted; None if it is not
    certain that `as_distributed` can replace them above the loop."""
    block, own = blocks(script, loop)
    try:
        created = _optimizer(script, block, None)
        early = _early_averages(script, block, own, created)
        _check_names(script, block, created, loop, None, early)
    except _Unclear:
        return None
    made, optimizer, model = created
    if (
        made not in own[: own.index(loop)]
        or not has_lines_of_its_own(script, made)
        or script.scope(loop) not in script.unguarded_scopes
    ):
        return None
    return Trained(model=model, optimizer=optimizer, made=made, averages=early)


def _epochs(script: Script) -> ast.For:
    """Returns the only training loop of the script. Raises _Unclear if there are several loops, or
    if the loop is not a `for` loop."""
    loops = script.training_loops()
    if len(loops) != 1:
        raise _Unclear(f"the script has {len(loops)} training loops", loops[1] if loops else None)
    if not isinstance(loops[0], ast.For):
        raise _Unclear(_NOT_RANGE, loops[0], remedy=_BY_STEPS)
    return loops[0]


def _without_bar(script: Script, node: ast.expr) -> ast.expr:
    """Returns the iterable that a progress bar wraps; the node itself if it is not a bar."""
    if isinstance(node, ast.Call) and node.args and script.full_name(node.func) in _WRAPPERS:
        return node.args[0]
    return node


def _counted(script: Script, block: list[ast.stmt], epochs: ast.For) -> _Epochs:
    looped = _without_bar(script, epochs.iter)
    if (
        not isinstance(looped, ast.Call)
        or script.full_name(looped.func) not in {"range"} | (BARS - _WRAPPERS)
        or any(isinstance(each, ast.Starred) for each in looped.args)
        or len(looped.args) not in (1, 2)
    ):
        raise _Unclear(_NOT_RANGE, epochs, remedy=_BY_EPOCHS)
    *begin, end = looped.args
    first = begin[0] if begin else ast.Constant(0)
    number = ast.unparse(end)
    if isinstance(first, ast.Constant) and first.value == 0:
        return _Epochs(number=number)
    if (
        isinstance(first, ast.Constant)
        and first.value == 1
        and isinstance(epochs.target, ast.Name)
        and not isinstance(epochs.body[0], Function)
        and has_lines_of_its_own(script, epochs.body[0])
    ):
        return _Epochs(number=_one_less(end), from_one=True)
    if isinstance(first, ast.Name) and (set_again := _starts_at_zero(script, block, epochs, first)):
        return _Epochs(number=number, start=first.id if len(set_again) > 1 else "")
    if isinstance(first, ast.Constant):
        raise _Unclear(_NOT_RANGE, epochs, remedy=_BY_EPOCHS)
    begins = ast.unparse(first)
    raise _Unclear(
        f"range({begins}, {number}): shoal.resume restores the epoch, so loop over "
        f"loader.epochs({number})",
        epochs,
        remedy=f"shoal.resume(directory) before the loop, without `{begins}`, and {_BY_EPOCHS}",
    )


def _one_less(end: ast.expr) -> str:
    """Returns an expression for one less than a number: `n` for `n + 1`."""
    if isinstance(end, ast.Constant) and isinstance(end.value, int):
        return str(end.value - 1)
    if (
        isinstance(end, ast.BinOp)
        and isinstance(end.op, ast.Add)
        and isinstance(end.right, ast.Constant)
        and end.right.value == 1
    ):
        return ast.unparse(end.left)
    return ast.unparse(ast.BinOp(end, ast.Sub(), ast.Constant(1)))


def _starts_at_zero(
    script: Script, block: list[ast.stmt], epochs: ast.For, variable: ast.Name
) -> list[ast.Name]:
    """Returns the places where the script sets a variable, if the first one is an unconditional
    assignment of 0 above the loop; otherwise an empty list."""
    scope = script.scope(epochs)
    places = [
        node
        for node in script.of_type(ast.Name)
        if node.id == variable.id
        and not isinstance(node.ctx, ast.Load)
        and script.scope(node) is scope
    ]
    shared = script.of_type(ast.Global, ast.Nonlocal)
    if not places or any(variable.id in each.names for each in shared):
        return []
    made = script.statement(places[0])
    if made not in block[: block.index(epochs)] or not isinstance(made, ast.Assign | ast.AnnAssign):
        return []
    value = dict(assigned(made)).get(variable.id)
    return places if isinstance(value, ast.Constant) and value.value == 0 else []


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
            raise _Unclear(f"gradients accumulate over several batches: {_ACCUMULATION}", branch)
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


def _advances(script: Script, inner: ast.For, step: ast.stmt) -> list[ast.stmt]:
    """Returns the statements directly below the optimizer's step that advance schedulers and
    averages. Raises _Unclear if another object steps elsewhere in the loop, unless it is a
    scheduler that registers itself: its step has no effect after an aborted step."""
    registered = {
        ast.unparse(target)
        for made in script.of_type(ast.Assign)
        if isinstance(made.value, ast.Call)
        and SCHEDULES.fullmatch(script.full_name(made.value.func))
        for target in made.targets
    }
    own = {
        ast.unparse(target)
        for made in script.of_type(ast.Assign)
        if any(call in {*averages(script)} for call in ast.walk(made.value))
        for target in made.targets
    }
    steps = [
        call
        for call in _method_calls(script, "step")
        if inner in script.above(call) and script.statement(call) is not step
    ]
    advancing = {
        script.statement(call)
        for call in (*steps, *_method_calls(script, "update_parameters"))
        if call in steps or _object_of(call) in own
    }
    found: list[ast.stmt] = []
    for below in inner.body[inner.body.index(step) + 1 :]:
        one_call = isinstance(below, ast.Expr) and isinstance(below.value, ast.Call)
        if not one_call or below not in advancing or below.lineno != below.end_lineno:
            break
        found.append(below)
    for call in steps:
        statement = script.statement(call)
        alone = statement in inner.body and not call.args and not call.keywords
        if statement not in found and not (alone and _object_of(call) in registered):
            raise _Unclear("expected a scheduler's step directly after the optimizer's", statement)
    return found


def _object_of(call: ast.Call) -> str:
    """Returns the object whose method is called, as text."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


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


def _source(script: Script, block: list[ast.stmt], epochs: ast.For, inner: ast.For) -> _Source:
    """Returns the loader of the loop over batches, without the progress bars around it."""
    looped, bars = _below_bars(script, epochs, inner, inner.iter)
    if isinstance(looped, ast.Call) and ast.unparse(looped.func) == "enumerate" and looped.args:
        looped, more = _below_bars(script, epochs, inner, looped.args[0])
        bars += more
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
        if (
            use.id == name
            and isinstance(use.ctx, ast.Load)
            and use is not looped
            and not _is_read(script, use)
        ):
            raise _Unclear(f"{name} is used outside of a `for`, enumerate() or len()", use)
    return _Source(loader=name, call=call, bars=tuple(bars))


def _below_bars(
    script: Script, epochs: ast.For, inner: ast.For, looped: ast.expr
) -> tuple[ast.expr, list[ast.Call]]:
    """Returns the iterable below the progress bars of an expression, and the bars."""
    bars = list[ast.Call]()
    while True:
        if isinstance(looped, ast.Name):
            bar: ast.expr | None = _named_bar(script, epochs, inner, looped)
        else:
            bar = looped if _without_bar(script, looped) is not looped else None
        if bar is None:
            return looped, bars
        assert isinstance(bar, ast.Call)
        bars.append(bar)
        looped = bar.args[0]


def _named_bar(script: Script, epochs: ast.For, inner: ast.For, used: ast.Name) -> ast.Call | None:
    """Returns the call that creates the progress bar with the name `used` in each epoch, above the
    loop over batches; None if there is no such bar.

    Raises _Unclear if the script uses the bar in another place as well.
    """
    name = used.id
    made = [
        part
        for part in epochs.body[: epochs.body.index(inner)]
        if isinstance(part, ast.Assign)
        and [ast.unparse(target) for target in part.targets] == [name]
        and _without_bar(script, part.value) is not part.value
    ]
    if len(made) != 1:
        return None
    bar = made[0].value
    assert isinstance(bar, ast.Call)
    if any(
        node.id == name and node not in (made[0].targets[0], used)
        for node in script.of_type(ast.Name)
        if script.scope(node) is script.scope(epochs)
    ):
        loader = ast.unparse(bar.args[0])
        raise _Unclear(
            f"the script uses the progress bar {name}",
            made[0],
            remedy=f"`for batch in {loader}:` without {name}, because `shoal run` shows the "
            f"progress; or {last_name(bar)}({loader}, disable=not shoal.is_main_process())",
        )
    return bar


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
    loop: Loop,
    loader: str | None,
    early: list[ast.stmt],
) -> None:
    """Checks that the names of model, optimizer and loader, if there is one, each refer to one
    object, and that no other object refers to the model before it is replaced. `early`: statements
    that will be moved below that place."""
    made, optimizer, model = created
    scope = script.scope(loop)
    once = [optimizer, *([loader] if loader else [])]
    made_once = [
        node
        for node in script.of_type(ast.Name)
        if node.id in once and not isinstance(node.ctx, ast.Load) and script.scope(node) is scope
    ]
    if len(made_once) != len(once):
        raise _Unclear(f"{' or '.join(once)} is assigned more than once", made_once[-1])
    later = {node for part in block[block.index(made) + 1 :] for node in ast.walk(part)}
    for rebound in script.of_type(ast.Name):
        bound = rebound.id == model and not isinstance(rebound.ctx, ast.Load)
        if bound and rebound in later and script.scope(rebound) is scope:
            raise _Unclear(f"{model} is assigned again after {optimizer} was created", rebound)
    for shared in script.of_type(ast.Global, ast.Nonlocal):
        if set(shared.names) & {model, *once}:
            raise _Unclear("a function assigns the model, the optimizer or the loader", shared)
    copied = {node for call in averages(script) for node in call.args}
    for part in block[: block.index(made)]:
        for node in ast.walk(part) if part not in early else ():
            if node in copied and ast.unparse(node) == model:
                raise _Unclear(EARLY_AVERAGE, part)
            if is_name(node, model) and _is_copied(script, node):
                raise _Unclear(
                    f"{model} is copied before as_distributed gives it this rank's "
                    "device and rank 0's weights; move this line below the one that creates "
                    f"{optimizer}, or average with torch.optim.swa_utils.AveragedModel, and run "
                    "`shoal init` again",
                    node,
                )
            if _takes_hold(script, node, model) and not _names_again(part, model):
                raise _Unclear(
                    f"other code may keep a reference to {model} from before as_distributed "
                    "replaces it",
                    node,
                )


def _check_called(model: str, inner: ast.For) -> None:
    if not any(
        isinstance(call, ast.Call) and ast.unparse(call.func) == model for call in ast.walk(inner)
    ):
        raise _Unclear(f"{model}(...) is not called in the loop over batches", inner)


def _early_averages(
    script: Script,
    block: list[ast.stmt],
    own: list[ast.stmt],
    created: tuple[ast.stmt, str, str],
) -> list[ast.stmt]:
    """Returns the statements above the optimizer that only create an average of the model, and
    that have the same effect below it: nothing in between uses the average, or changes a variable
    that the statement uses."""
    made, _, model = created
    if made not in own:
        return []
    found: list[ast.stmt] = []
    above = own[: own.index(made)]
    for number, part in enumerate(above):
        between = [each for each in (*above[number + 1 :], made) if not isinstance(each, Function)]
        if (
            isinstance(part, ast.Assign)
            and isinstance(part.targets[0], ast.Name)
            and len(part.targets) == 1
            and _averages_only(script, part.value, model)
            and has_lines_of_its_own(script, part)
            and not _touched(script, between, part, part.targets[0].id)
        ):
            found.append(part)
    return found


def _averages_only(script: Script, value: ast.expr, model: str) -> bool:
    """Returns whether an expression is `AveragedModel(model, ...)`, possibly moved to a device."""
    uses = [node for node in ast.walk(value) if is_name(node, model)]
    while isinstance(value, ast.Call) and last_name(value) in ("to", "cuda", "eval"):
        if not isinstance(value.func, ast.Attribute):
            return False
        value = value.func.value
    return (
        isinstance(value, ast.Call)
        and script.full_name(value.func) == AVERAGED_MODEL
        and len(uses) == 1
        and value.args[:1] == uses
    )


def _touched(script: Script, between: list[ast.stmt], made: ast.stmt, average: str) -> bool:
    """Returns whether statements use an average, or change a variable that creates it."""
    needed = {node.id for node in ast.walk(made) if isinstance(node, ast.Name)}
    for node in (node for part in between for node in ast.walk(part)):
        if isinstance(node, ast.Name) and (
            node.id == average or (node.id in needed and not isinstance(node.ctx, ast.Load))
        ):
            return True
        if isinstance(node, ast.Call) and any(
            has_name(function, average) for function in script.called(node)
        ):
            return True
    return False


def _is_copied(script: Script, node: ast.AST) -> bool:
    """Returns whether a node is the argument of copy.deepcopy."""
    parent = next(script.above(node))
    return isinstance(parent, ast.Call) and script.full_name(parent.func) == "copy.deepcopy"


def _takes_hold(script: Script, node: ast.AST, model: str) -> bool:
    """Returns whether a node uses the model itself as a value (as an argument, in an assignment or
    in a container), so that other code may keep a reference to it. Printing the model, calling it,
    or accessing one of its attributes or items, does not count."""
    if not isinstance(node, ast.Name) or node.id != model or not isinstance(node.ctx, ast.Load):
        return False
    parent = next(script.above(node))
    called = isinstance(parent, ast.Call) and (
        parent.func is node or ast.unparse(parent.func) == "print"
    )
    part_of_it = isinstance(parent, ast.Attribute) or (
        isinstance(parent, ast.Subscript) and parent.value is node
    )
    return not part_of_it and not called


def _names_again(part: ast.stmt, model: str) -> bool:
    """Returns whether a statement only rebinds the model's own name, as in `model = f(model)`."""
    return isinstance(part, ast.Assign) and [ast.unparse(each) for each in part.targets] == [model]


# -------------------------------------------------------------------------------------- conversion


def _convert_loop(shape: _Shape, edits: Edits) -> None:
    indent = edits.indent(shape.epochs.lineno)
    edits.enclose(shape.source.call, "shoal.ElasticDataLoader.from_dataloader(", ")")
    counted = shape.counted
    edits.replace(shape.epochs.iter, f"{shape.source.loader}.epochs({counted.number})")
    first = shape.epochs.body[0].lineno
    if counted.from_one:
        epoch = ast.unparse(shape.epochs.target)
        edits.before(first, f"{edits.indent(first)}{epoch} += 1  # the first epoch is 1\n")
    if counted.start:
        edits.before(shape.epochs.lineno, _refusal(counted.start, edits.indent(first), indent))
    for bar in shape.source.bars:
        edits.unwrap(bar)
    if shape.loss:
        edits.below(shape.backward, f"shoal.report(loss={shape.loss})")
    if shape.advances:
        assert isinstance(shape.step, ast.Expr)
        edits.enclose(shape.step.value, "if ", ":")
        for advance in shape.advances:
            edits.shift(advance)


def _refusal(start: str, deeper: str, indent: str) -> str:
    """Returns the lines that end a run that would continue at another epoch than 0. `deeper`,
    `indent`: whitespace in front of their second and their first line."""
    return (
        f"{indent}{_refused(start)}\n"
        f'{deeper}raise SystemExit(f"cannot start at epoch {{{start}}}: use shoal.resume")\n'
    )


def _refused(start: str) -> str:
    return f"if {start} != 0:"


def _own_resuming(converted: str, start: str) -> Finding:
    """Returns the finding for the lines of `_refusal` in a converted script."""
    lines = [line.strip() for line in converted.splitlines()]
    return Finding(
        line=lines.index(_refused(start)) + 1,
        what=f"the loop starts at epoch 0 or where shoal.resume continues, not at {start}",
        remedy=f"remove these lines and the code that sets {start}; shoal.resume(directory) before "
        "the loop, and shoal.save_checkpoint(directory) at the end of each epoch",
    )


# --------------------------------------------------------------------------- comments with findings


def _marked(source: str, name: str, left: list[Finding]) -> tuple[str, int]:
    """Inserts a comment with the findings above each statement that has any. Returns the new script
    and the number of comments.

    `left`: problems found during the conversion, in addition to the findings of `check`.
    """
    script = Script(source, name)
    edits = Edits(source)
    found = [each for each in check(source, name) or () if not each.note]
    for finding in (*left, *found):
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
