"""Finds out where the batches of training loops come from: a loader, the script itself, or a source
that the script does not show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeGuard

from shoal.checking.draws import Draws
from shoal.checking.loaders import PASSES_ON, all_loaders
from shoal.checking.script import (
    Function,
    Loop,
    Script,
    assigned,
    has_name,
    is_no_grad,
    last_name,
    words_in,
)

_COUNTING: Final = frozenset({"range", "trange", "count", "repeat", "epochs"})
_GETS: Final = frozenset({"get", "next", "sample", "make", "draw", "load", "fetch", "generate"})
_RECORDS: Final = frozenset({"loss", "losses", "history", "log", "logs", "metrics", "rewards"})
"""Words in the names of lists that a loop fills with results."""
_FILLS: Final = frozenset({"append", "appendleft", "extend", "add", "push", "insert"})
"""Methods that add samples to a buffer."""


@dataclass(frozen=True)
class Origin:
    """Source of the batches of a training loop that no loader feeds."""

    loop: Loop
    made_by: ast.AST | None
    """The expression or loop that makes the batches; None if the script does not show it."""
    collected: bool = False
    """True if the loop trains on samples that it collects itself, as in reinforcement learning."""


class Sources:
    """Classifies what training loops take their batches from."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loaders = script.once(all_loaders)
        self._draws = Draws(script)
        self.executed_by = {loop: [*self._executed(loop)] for loop in script.training_loops()}
        """Nodes that each training loop executes with gradients, including those in functions of
        the script that it calls."""

    def drawn_by_next(self) -> Iterator[ast.expr]:
        """Yields the arguments of `next()` in training loops, except for `next(iter(loader))`,
        which reads only the first batch."""
        for nodes in self.executed_by.values():
            for node in nodes:
                if _is_next(node) and not isinstance(node.args[0], ast.Call):
                    yield node.args[0]

    def without_loader(self) -> Iterator[Origin]:
        """Yields the origin of the batches of each training loop that takes them from no loader of
        the script. Of nested loops, only the one that takes the batches is considered, or the
        innermost. Loops over `loader.epochs(n)` are left out if the script does not make their
        batches, because only Shoal's loaders have this method."""
        executed = {loop: {*nodes} for loop, nodes in self.executed_by.items()}
        fed = [
            executed[loop]
            for loop, nodes in self.executed_by.items()
            if any(self._loaders.of(source) for source in self._iterated(nodes))
        ]
        found = {
            loop: self._origin(loop, nodes)
            for loop, nodes in self.executed_by.items()
            if not any(loop in others for others in fed)
        }
        takes_none = {
            inner
            for inner, origin in found.items()
            if origin.made_by is None
            and all(map(self.counts, self._iterated(self.executed_by[inner])))
            and any(
                outer is not inner
                and inner in executed[outer]
                and not all(map(self.counts, self._iterated(self.executed_by[outer])))
                for outer in found
            )
        }
        by_epochs = [executed[loop] for loop in executed if over_epochs(loop)]
        for loop, origin in found.items():
            inside = executed[loop] & (found.keys() - takes_none - {loop})
            if loop in takes_none or inside:
                continue
            if origin.made_by is not None or not any(loop in nodes for nodes in by_epochs):
                yield origin

    def outer_loops(self) -> list[Loop]:
        """Returns the training loops that no other training loop executes."""
        executed = {loop: {*nodes} for loop, nodes in self.executed_by.items()}
        return [
            loop
            for loop in executed
            if not any(loop in nodes for other, nodes in executed.items() if other is not loop)
        ]

    def makes_batches(self, loop: Loop) -> bool:
        """Returns whether each iteration of a loop makes a batch, as `x, y = get_batch("val")` and
        cuts from an array do."""
        return self._cuts(loop) or any(
            self._gets(node) and self._script.loop_around(node) is loop for node in ast.walk(loop)
        )

    def _executed(self, loop: Loop) -> Iterator[ast.AST]:
        """Yields the nodes that the loop executes with gradients, including those in functions of
        the script that it calls."""
        followed = set[Function]()
        left: list[ast.AST] = [loop]
        while left:
            node = left.pop()
            yield node
            if isinstance(node, ast.With) and any(
                is_no_grad(item.context_expr) for item in node.items
            ):
                continue
            left += ast.iter_child_nodes(node)
            for function in self._script.called(node) if isinstance(node, ast.Call) else ():
                if function not in followed and not any(map(is_no_grad, function.decorator_list)):
                    followed.add(function)
                    left += function.body

    def _iterated(self, nodes: list[ast.AST]) -> Iterator[ast.expr]:
        """Yields the expressions from which loops or `next()` take what they train on."""
        for node in nodes:
            if isinstance(node, ast.For | ast.AsyncFor) and self._script.trains(node):
                yield node.iter
            elif _is_next(node):
                yield node.args[0]

    def _origin(self, loop: Loop, nodes: list[ast.AST]) -> Origin:
        """Returns where the batches come from; `made_by` is None if they may come from an object of
        which the script does not show how it is created."""
        sources = [each for each in self._iterated(nodes) if not self.counts(each)]
        generators = [function for each in sources for function in self._generators(each)]
        if sources and not generators:
            return Origin(loop, None)
        nodes = [*nodes, *(part for function in generators for part in ast.walk(function))]
        draws = {node: data for node in nodes if (data := self._draws.selected_by(node))}
        if any(map(_steps_environment, nodes)):
            return Origin(loop, _first(draws) or loop, collected=True)
        filled = {name for node in nodes for name in _filled(node)}
        if buffers := [node for node, data in draws.items() if ast.unparse(data) in filled]:
            return Origin(loop, _first(buffers), collected=True)
        for found in (
            [*draws],
            [node for node in nodes if self._cuts(node)],
            [node for node in nodes if self._gets(node)],
        ):
            if found:
                return Origin(loop, _first(found))
        return Origin(loop, sources[0] if sources else None)

    def counts(self, source: ast.expr, followed: frozenset[str] = frozenset()) -> bool:
        """Returns whether an iterable only counts or enumerates values in the script."""
        if isinstance(source, ast.Call):
            if last_name(source) in _COUNTING:
                return True
            passed_on = last_name(source) in (*PASSES_ON, "list", "reversed") and source.args
            return bool(passed_on) and self.counts(source.args[0], followed)
        if isinstance(source, ast.Name) and source.id not in followed:
            values = [*self._values(source.id)]
            followed |= {source.id}
            return bool(values) and all(self.counts(value, followed) for value in values)
        return isinstance(source, ast.Tuple | ast.List)

    def _values(self, name: str) -> Iterator[ast.expr]:
        """Yields the expressions that the script assigns to a name."""
        for node in self._script.of_type(ast.Assign, ast.With):
            if isinstance(node, ast.Assign):
                if name in (ast.unparse(target) for target in node.targets):
                    yield node.value
            else:
                for item in node.items:
                    if item.optional_vars and ast.unparse(item.optional_vars) == name:
                        yield item.context_expr

    def _generators(
        self, source: ast.expr, followed: frozenset[str] = frozenset()
    ) -> Iterator[Function]:
        """Yields the generator functions of the script whose values an iterable yields."""
        if isinstance(source, ast.Call):
            if last_name(source) in PASSES_ON and source.args:
                yield from self._generators(source.args[0], followed)
            for function in self._script.called(source):
                if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(function)):
                    yield function
        elif isinstance(source, ast.Name | ast.Attribute):
            name = ast.unparse(source)
            if name not in followed:
                for value in self._values(name):
                    yield from self._generators(value, followed | {name})

    def _cuts(self, node: ast.AST) -> bool:
        """Returns whether a node is a loop that cuts its batches out of an array, as in `for i in
        range(0, len(x), 32): x[i : i + 32]`. The bounds may also be computed from the loop's
        counter, and a `while` loop may count itself."""
        if isinstance(node, ast.For) and self.counts(node.iter):
            counters = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.While):
            counters = {
                part.target.id
                for part in ast.walk(node)
                if isinstance(part, ast.AugAssign)
                and isinstance(part.target, ast.Name)
                and isinstance(part.op, ast.Add)
                and has_name(node.test, part.target.id)
            }
        else:
            return False
        direct = counters if isinstance(node, ast.For) else set[str]()
        bounds = _computed_from(counters, node)
        for part in ast.walk(node):
            if not isinstance(part, ast.Subscript) or words_in(part.value) & _RECORDS:
                continue
            cuts = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            if any(isinstance(cut, ast.Slice) and _uses(cut, direct) for cut in cuts) or (
                isinstance(part.ctx, ast.Load)
                and isinstance(cuts[0], ast.Slice)
                and _uses(cuts[0], bounds)
            ):
                return True
        return False

    def _gets(self, node: ast.AST) -> bool:
        """Returns whether a node calls a function of the script that seems to make a batch, judged
        by its name."""
        if not isinstance(node, ast.Call) or not any(self._script.called(node)):
            return False
        words = set(re.findall(r"[a-z]+", last_name(node).lower()))
        return bool(words & {"batch", "batches"} and words & _GETS)


_ARITHMETIC: Final = (ast.BinOp, ast.UnaryOp, ast.Name, ast.Attribute, ast.Constant)
_BOUNDS: Final = frozenset({"min", "max", "int", "len"})


def _computed_from(counters: set[str], loop: ast.AST) -> set[str]:
    """Returns the variables that a loop computes from its counters by arithmetic, including the
    counters."""
    found, before = {*counters}, set[str]()
    while found != before:
        before = {*found}
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign):
                found |= {
                    name
                    for name, value in assigned(node)
                    if _uses(value, found) and all(map(_is_arithmetic, ast.walk(value)))
                }
    return found


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _BOUNDS
    return isinstance(node, (*_ARITHMETIC, ast.operator, ast.unaryop, ast.expr_context))


def _uses(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _is_next(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and last_name(node) == "next" and bool(node.args)


def _first(nodes: Iterable[ast.AST]) -> ast.AST | None:
    return min(nodes, key=lambda node: getattr(node, "lineno", 0), default=None)


def over_epochs(loop: Loop) -> bool:
    """Returns whether a loop is over `loader.epochs(n)`."""
    return isinstance(loop, ast.For) and any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "epochs"
        for part in ast.walk(loop.iter)
    )


def _steps_environment(node: ast.AST) -> bool:
    """Returns whether a node is a step in an environment of reinforcement learning."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and bool(words_in(node.func.value) & {"env", "envs", "environment"})
    )


def _filled(node: ast.AST) -> Iterator[str]:
    """Yields the names of the collections to which a node adds samples."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _FILLS:
            yield ast.unparse(node.func.value)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield ast.unparse(node.value)
