"""Finds where the optimizers of a script step: after how many batches, and which variables count
the steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from shoal.checking.loaders import Loaders, all_loaders
from shoal.checking.script import (
    Function,
    Loop,
    Script,
    argument,
    assigned,
    has_name,
    is_name,
    last_name,
    words_in,
)
from shoal.checking.sources import Sources

OPTIMIZERS: Final = re.compile(r"torch\.optim\.[A-Z]\w+")
OPTIMIZER_WORDS: Final = frozenset({"opt", "optim", "optimizer", "optimizers"})
_SCHEDULER_WORDS: Final = frozenset({"lr", "sched", "scheduler", "schedulers"})


def accumulating_loops(script: Script) -> Iterator[tuple[Loop, ast.stmt]]:
    """Yields each loop that accumulates gradients over several batches before an optimizer step,
    together with the statement that counts the batches: the `if` that decides when to step, or the
    loop itself, if the step comes after it."""
    loaders = script.once(all_loaders)
    optimizers = script.once(optimizer_names)
    for loop in script.of_type(ast.For, ast.AsyncFor, ast.While):
        if not script.trains(loop):
            continue
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        if _passes_before_step(script, loop, loaders, optimizers):
            yield loop, loop
        over_batches = not isinstance(loop, ast.While) and loaders.of(loop.iter)
        if not over_batches and any(
            script.loop_around(call) is not loop
            for call in calls
            if is_optimizer_step(call, optimizers)
        ):
            continue
        steps = [
            _counted_branch(script, call, loop)
            for call in calls
            if is_optimizer_step(call, optimizers)
        ]
        passes = {
            _counted_branch(script, call, loop) for call in calls if last_name(call) == "backward"
        }
        if steps and steps[0] and None not in steps and passes - set(steps):
            yield loop, steps[0][0]


def sums_of_losses(script: Script) -> Iterator[tuple[ast.AST, str]]:
    """Yields each statement that adds a loss to a sum or a list over several optimizer steps,
    without a condition on the result of `optimizer.step()`, and the name of the sum. Considers only
    loops over loaders, because only a loader returns the samples of an aborted step again."""
    loaders = script.once(all_loaders)
    optimizers = script.once(optimizer_names)
    registered = {  # restored after an aborted step
        name
        for node in script.of_type(ast.Assign)
        if last_name(node.value) == "register_state"
        for name, _ in assigned(node)
    }
    for adding, name, value in additions(script):
        around = script.loop_around(adding)
        if around is None or not script.trains(around) or name.partition(".")[0] in registered:
            continue
        loop = next(
            (each for each in (around, *_loops_above(script, around)) if _steps(each, optimizers)),
            None,
        )
        if (
            loop is not None
            and any(
                isinstance(each, ast.For) and loaders.of(each.iter)
                for each in (loop, *_loops_above(script, loop))
            )
            and any(has_name(value, loss) for loss in _losses(loop))
            and not _starts_in(script, loop, name)
            and not _follows_outcome(script, adding, loop)
        ):
            yield adding, name


def additions(script: Script) -> Iterator[tuple[ast.stmt, str, ast.AST]]:
    """Yields each statement that adds to a sum or appends to a list: the statement, the name of the
    sum or list, and what is added."""
    for node in script.of_type(ast.AugAssign):
        if isinstance(node.op, ast.Add):
            yield node, ast.unparse(node.target), node.value
    for made in script.of_type(ast.Assign):
        if isinstance(made.value, ast.BinOp) and isinstance(made.value.op, ast.Add):
            name = ast.unparse(made.targets[0])
            for one, other in (
                (made.value.left, made.value.right),
                (made.value.right, made.value.left),
            ):
                if isinstance(one, ast.Name | ast.Attribute) and ast.unparse(one) == name:
                    yield made, name, other
    for call in script.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and call.args:
            yield script.statement(call), ast.unparse(call.func.value), call.args[0]


def _loops_above(script: Script, loop: Loop) -> Iterator[Loop]:
    while (around := script.loop_around(loop)) is not None:
        yield around
        loop = around


def _steps(loop: Loop, optimizers: set[str]) -> bool:
    return any(
        isinstance(part, ast.Call) and is_optimizer_step(part, optimizers)
        for part in ast.walk(loop)
    )


def _losses(loop: Loop) -> set[str]:
    """Returns the variables of which a loop computes gradients, or that `train_step` returns."""
    found = set[str]()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and last_name(node) == "backward":
            of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for differentiated in (*of, *node.args):
                names = {part.id for part in ast.walk(differentiated) if isinstance(part, ast.Name)}
                found |= {name for name in names if "loss" in name.lower()}
                if isinstance(differentiated, ast.Name):
                    found.add(differentiated.id)
        elif isinstance(node, ast.Assign) and last_name(node.value) == "train_step":
            found |= {name for name, _ in assigned(node)}
    return found


def _starts_in(script: Script, loop: Loop, name: str) -> bool:
    """Returns whether each iteration of a loop gives a variable a new value."""
    return any(
        isinstance(node, ast.Assign | ast.AnnAssign)
        and script.loop_around(node) is loop
        and node.value is not None
        and not _mentions(node.value, {name})
        and any(
            ast.unparse(target) == name
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
        for node in ast.walk(loop)
    )


def _calls_step(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and last_name(part) == "step" for part in ast.walk(node))


def _follows_outcome(script: Script, node: ast.AST, loop: Loop) -> bool:
    """Returns whether a statement in a loop depends on the result of a step."""
    outcomes = {
        name
        for made in ast.walk(loop)
        if isinstance(made, ast.Assign) and _calls_step(made.value)
        for name, _ in assigned(made)
    }
    return any(
        _mentions(branch.test, outcomes) or _calls_step(branch.test)
        for branch, _ in _branches(script, node, loop)
    )


def _branches(script: Script, node: ast.AST, loop: Loop) -> Iterator[tuple[ast.If, bool]]:
    """Yields the `if` statements that decide whether an iteration of a loop executes `node`,
    innermost first: those around it, and earlier ones that end with `continue`. Also yields the
    outcome of the test, True or False, with which `node` is executed."""
    below = node
    for above in (*script.until(node, loop), loop):
        if isinstance(above, ast.If) and below is not above.test:
            yield above, below in above.body
        for block in (getattr(above, name, None) for name in ("body", "orelse")):
            if isinstance(block, list) and below in block:
                for before in block[: block.index(below)]:
                    if isinstance(before, ast.If) and isinstance(before.body[-1], ast.Continue):
                        yield before, False
        below = above


def _passes_before_step(script: Script, loop: Loop, loaders: Loaders, optimizers: set[str]) -> bool:
    """Returns whether a loop is repeated a number of times, as in `for i in range(n)`, and runs a
    backward pass each time, and the optimizer steps after it. A loop that divides a batch of
    another loop does not count, even if the other loop calls its function."""
    around = script.loop_around(loop)
    if not _is_counted(loop) or any(
        isinstance(outer, ast.For | ast.AsyncFor)
        and (loaders.of(outer.iter) or not script.once(Sources).counts(outer.iter))
        for outer in _outer_loops(script, loop)
    ):
        return False
    within = around if around is not None else script.scope(loop)
    passes = steps_later = False
    for call in (node for node in ast.walk(within or loop) if isinstance(node, ast.Call)):
        inside = loop in script.above(call)
        if is_optimizer_step(call, optimizers):
            if inside:
                return False
            steps_later = steps_later or (
                call.lineno > loop.lineno and script.loop_around(call) is around
            )
        elif inside and last_name(call) == "backward":
            passes = passes or script.loop_around(call) is loop
    return passes and steps_later


def _is_counted(loop: Loop) -> bool:
    """Returns whether a loop is `for i in range(n)`, or `while i < n` with `i += 1`."""
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Compare) and _mentions(loop.test, _counted_by(loop))
    return last_name(loop.iter) in ("range", "trange", "tqdm")


def _outer_loops(script: Script, loop: Loop) -> Iterator[Loop]:
    """Yields the loops that execute a loop, including those that call its function."""
    callers = script.once(_callers)
    left: list[ast.AST] = [loop]
    followed = set[ast.AST]()
    while left:
        for above in script.above(left.pop()):
            if isinstance(above, Loop):
                yield above
            elif isinstance(above, Function) and above not in followed:
                followed.add(above)
                left += callers.get(above, ())


def _callers(script: Script) -> dict[Function, list[ast.Call]]:
    found: dict[Function, list[ast.Call]] = {}
    for call in script.calls():
        for function in script.called(call):
            found.setdefault(function, []).append(call)
    return found


def _counted_branch(script: Script, node: ast.AST, loop: Loop) -> tuple[ast.If, bool] | None:
    """Returns the outermost `if` statement that decides, from a count of batches, whether an
    iteration of the loop executes `node`. Also returns the outcome of its test, True or False, with
    which `node` is executed. Returns None if every iteration executes `node`."""
    found = None
    for branch, outcome in _branches(script, node, loop):
        if _counts(branch.test, loop):
            found = branch, outcome
    return found


def _counts(test: ast.expr, loop: Loop) -> bool:
    """Returns whether a condition depends on a count of iterations: it uses a remainder, or it
    compares a variable that the loop increments."""
    counters = _counted_by(loop)
    remainders = {
        name
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign)
        for name, value in assigned(node)
        if _has_remainder(value)
    }
    return (
        _has_remainder(test)
        or any(has_name(test, name) for name in remainders)
        or (isinstance(test, ast.Compare) and _mentions(test, counters))
    )


def _counted_by(loop: Loop) -> set[str]:
    """Returns the variables and attributes that each iteration of a loop increments."""
    return {name for node in loop.body if (name := incremented(node))}


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in names
        for part in ast.walk(node)
    )


def incremented(node: ast.AST) -> str | None:
    """Returns the variable or attribute that a statement increments by a constant, as `n += 1` or
    `n = n + 1` does; None if there is none."""
    if (
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add | ast.Sub)
        and isinstance(node.value, ast.Constant)
    ):
        return ast.unparse(node.target)
    if (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
    ):
        name = ast.unparse(node.targets[0])
        for one, other in (
            (node.value.left, node.value.right),
            (node.value.right, node.value.left),
        ):
            if (
                isinstance(one, ast.Name | ast.Attribute)
                and isinstance(other, ast.Constant)
                and ast.unparse(one) == name
            ):
                return name
    return None


def _has_remainder(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Mod) for part in ast.walk(node))


def is_optimizer_step(call: ast.Call, optimizers: set[str]) -> bool:
    """Returns whether a call is the step of an optimizer, or that of a GradScaler."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and any(
            ast.unparse(part) in optimizers
            or (words_in(part) & OPTIMIZER_WORDS and not words_in(part) & _SCHEDULER_WORDS)
            for part in (call.func.value, *call.args)
        )
    )


def created_optimizers(script: Script) -> list[ast.Assign]:
    """Returns the assignments that create a torch optimizer."""
    return [
        node
        for node in script.of_type(ast.Assign)
        if isinstance(node.value, ast.Call)
        and OPTIMIZERS.fullmatch(script.full_name(node.value.func))
    ]


def optimizer_names(script: Script) -> set[str]:
    """Returns the names of the optimizers that the script creates or gets from as_distributed."""
    made = {ast.unparse(target) for node in created_optimizers(script) for target in node.targets}
    return made | script.once(distributed_names)[1]


def distributed_names(script: Script) -> tuple[set[str], set[str]]:
    """Returns the names of the models, and those of the optimizers, that the script gets from
    as_distributed."""
    models, optimizers = set[str](), set[str]()
    for node in script.of_type(ast.Assign):
        if isinstance(node.value, ast.Call) and last_name(node.value).startswith("as_distributed"):
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    models |= {ast.unparse(each) for each in target.elts[:1]}
                    optimizers |= {ast.unparse(each) for each in target.elts[1:]}
    return models, optimizers


def counters(script: Script, value: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Yields the variables in an expression that count steps of a training loop: names, and
    attributes of `self`. Also yields those on which the values of the other names depend."""
    left = [value]
    followed: dict[tuple[Function | None, str], bool] = {}
    while left:
        for part in ast.walk(left.pop()):
            if isinstance(part, ast.Attribute):
                if is_name(part.value, "self") and increments(
                    script, script.of_type(ast.For, ast.While), ast.unparse(part)
                ):
                    yield part
            elif isinstance(part, ast.Name):
                variable = script.scope(part), part.id
                if variable not in followed:
                    followed[variable] = _counts_steps(script, *variable)
                    if not followed[variable]:
                        left += _origins(script, *variable)
                if followed[variable]:
                    yield part


def _counts_steps(script: Script, scope: Function | None, name: str) -> bool:
    """Returns whether a variable counts the steps of a training loop: the loop increments it, or
    takes it from a `range` or from `enumerate`. The number of an epoch does not count."""
    for loop in script.of_type(ast.For, ast.While):
        if script.scope(loop) is not scope or not script.trains(loop):
            continue
        if isinstance(loop, ast.For) and has_name(loop.target, name):
            over = loop.iter
            while isinstance(over, ast.Call) and last_name(over) == "tqdm" and over.args:
                over = over.args[0]
            if last_name(over) == "enumerate":
                assert isinstance(over, ast.Call)
                first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
                return first is not None and is_name(first, name) and steps_in(script, loop)
            return last_name(over) in ("range", "trange", "count") and steps_in(script, loop)
        if increments(script, [loop], name):
            return True
    return False


def increments(script: Script, loops: Iterable[Loop], counter: str) -> bool:
    """Returns whether one of the loops increments a counter with each step."""
    return any(
        incremented(node) == counter
        and (around := script.loop_around(node)) is not None
        and steps_in(script, around)
        for loop in loops
        for node in ast.walk(loop)
    )


def steps_in(script: Script, loop: Loop) -> bool:
    """Returns whether each iteration of a loop takes a step, rather than an epoch of steps."""
    optimizers = script.once(optimizer_names)
    return any(
        script.loop_around(call) is loop
        and (
            is_optimizer_step(call, optimizers)
            or any(
                script.trains(function) and not any(map(script.trains, _loops_in(function)))
                for function in script.called(call)
            )
        )
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
    )


def _loops_in(node: ast.AST) -> Iterator[Loop]:
    return (part for part in ast.walk(node) if isinstance(part, Loop))


def assigned_values(script: Script) -> dict[tuple[Function | None, str], list[ast.AST]]:
    """Returns the values that each variable of a scope is assigned."""
    found: dict[tuple[Function | None, str], list[ast.AST]] = {}
    for made in script.of_type(ast.Assign, ast.AnnAssign):
        for name, value in assigned(made):
            found.setdefault((script.scope(made), name), []).append(value)
    return found


def _origins(script: Script, scope: Function | None, name: str) -> Iterator[ast.AST]:
    """Yields the expressions whose values a variable of a scope may have."""
    yield from script.once(assigned_values).get((scope, name), ())
    if scope is None:
        return
    names = [each.arg for each in (*scope.args.posonlyargs, *scope.args.args)]
    names = names[1:] if names[:1] == ["self"] else names
    if name not in names:
        return
    for call in script.calls():
        if scope in script.called(call):
            value = argument(call, names.index(name), name)
            if value is not None:
                yield value
