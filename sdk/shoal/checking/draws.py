"""Tells apart random draws that select samples from those that do not, such as augmentations and
diffusion steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from shoal.checking.script import Loop, Script, last_name, words_in

_DRAWS: Final = re.compile(
    r"torch\.(randint|randperm|multinomial)"
    r"|numpy\.random\.(randint|random_integers|choice|permutation|shuffle)"
    r"|random\.(sample|choice|choices|randint|randrange|shuffle)"
)
"""Functions that draw indices or samples."""
_DRAWS_OF_LIST: Final = frozenset(
    {"random.sample", "random.choice", "random.choices", "random.shuffle"}
)
"""Functions that draw from the elements of their argument."""
_GENERATOR_DRAWS: Final = frozenset({"integers", "permutation", "permuted", "choice", "choices"})
"""Methods of random generators that draw indices or samples."""
_SELECTS: Final = frozenset({"index_select", "take", "Subset", "__getitem__"})
"""Functions that select samples by the indices passed to them."""
_SCHEDULES: Final = frozenset(
    {"alpha", "alphas", "beta", "betas", "sigma", "sigmas", "sqrt", "cumprod", "schedule", "noise"}
)
"""Words in the names of tables that a diffusion model indexes with its steps."""
_TIMES: Final = frozenset({"t", "ts", "tau", "time", "times", "timestep", "timesteps"})
"""Words in the names of these steps."""


class Draws:
    """Follows drawn values through a script to the data that they select."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loads: dict[str, list[ast.expr]] = {}
        for node in script.of_type(ast.Name, ast.Attribute):
            if isinstance(node.ctx, ast.Load) and (name := _dotted(node)):
                self._loads.setdefault(name, []).append(node)

    def selected_by(self, node: ast.AST) -> ast.expr | None:
        """Returns the data from which a node draws samples; None if it draws none."""
        if not isinstance(node, ast.Call) or not self._is_draw(node):
            return None
        of_list = self._script.full_name(node.func) in _DRAWS_OF_LIST and node.args
        if of_list and self._is_samples(node.args[0]):
            if last_name(node) == "shuffle":
                return node.args[0] if self._is_cut_or_iterated(node.args[0]) else None
            if self._is_passed_on(node):
                return node.args[0]
        shuffled = node.args[:1] if last_name(node) == "shuffle" else []
        return self._indexed_by([node, *(use for each in shuffled for use in self._uses(each))])

    def _is_draw(self, call: ast.Call) -> bool:
        return bool(_DRAWS.fullmatch(self._script.full_name(call.func))) or (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in _GENERATOR_DRAWS
            and bool(words_in(call.func.value) & {"rng", "generator", "random", "rand"})
        )

    def _is_samples(self, values: ast.expr, followed: frozenset[str] = frozenset()) -> bool:
        """Returns whether a list may contain samples, rather than literal values or numbers."""
        if isinstance(values, ast.Call) and last_name(values) == "list" and values.args:
            return self._is_samples(values.args[0], followed)
        if isinstance(values, ast.Call) and last_name(values) == "range":
            return False
        if isinstance(values, ast.List | ast.Tuple | ast.Set) and values.elts:
            return not all(isinstance(each, ast.Constant) for each in values.elts)
        name = _dotted(values)
        if name and name not in followed:
            made = [
                made.value
                for made in self._script.of_type(ast.Assign)
                if name in map(_dotted, made.targets)
            ]
            return not made or any(self._is_samples(each, followed | {name}) for each in made)
        return True

    def _is_cut_or_iterated(self, values: ast.expr) -> bool:
        for use in self._uses(values):
            parent = next(self._script.above(use))
            if isinstance(parent, Loop | ast.comprehension | ast.Subscript):
                return True
        return False

    def _is_passed_on(self, drawn: ast.expr) -> bool:
        """Returns whether a drawn sample is passed to a function, cut, iterated or yielded."""
        left: list[ast.expr] = [drawn]
        followed = set[ast.AST]()
        while left:
            node = left.pop()
            if node in followed:
                continue
            followed.add(node)
            below: ast.AST = node
            for above in self._script.above(node):
                if isinstance(above, ast.Compare | ast.BoolOp) or below is getattr(
                    above, "test", None
                ):
                    break
                if isinstance(above, ast.Call) and below is not above.func:
                    return True
                if isinstance(
                    above, ast.For | ast.comprehension | ast.Subscript | ast.Starred | ast.Yield
                ):
                    return True
                if isinstance(above, ast.Call):
                    break  # the drawn object is a function
                if isinstance(above, ast.stmt | ast.NamedExpr):
                    left += self._assigned_by(above)
                    break
                below = above
        return False

    def _indexed_by(self, drawn: list[ast.expr]) -> ast.expr | None:
        """Returns the data that the drawn indices, or values computed from them, select."""
        left = [*drawn]
        followed = set[ast.AST]()
        while left:
            node = left.pop()
            if node in followed:
                continue
            followed.add(node)
            below: ast.AST = node
            for above in self._script.above(node):
                if isinstance(above, ast.Compare) or below is getattr(above, "test", None):
                    break
                if isinstance(above, ast.Subscript) and below is above.slice:
                    if self._selects_samples(above, node):
                        return above.value
                    break
                if isinstance(above, ast.Call) and below is not above.func:
                    if last_name(above) in _SELECTS:
                        return above.func.value if isinstance(above.func, ast.Attribute) else above
                    left += self._parameters(above, below)
                elif isinstance(above, ast.comprehension | ast.For) and below is above.iter:
                    left += self._uses_of_targets(above.target)
                    break
                elif isinstance(above, ast.stmt | ast.NamedExpr):
                    left += self._assigned_by(above)
                    break
                below = above
        return None

    def _selects_samples(self, indexed: ast.Subscript, index: ast.AST) -> bool:
        """Returns whether an index selects samples: it is the first one, and the indexed object is
        not a schedule, nor is the index a time."""
        first = indexed.slice.elts[0] if isinstance(indexed.slice, ast.Tuple) else indexed.slice
        return (
            isinstance(indexed.ctx, ast.Load)
            and not words_in(indexed.value) & _SCHEDULES
            and not words_in(index) & _TIMES
            and any(part is index for part in ast.walk(first))
        )

    def _assigned_by(self, made: ast.AST) -> Iterator[ast.expr]:
        """Yields where the value of a statement is used: an assigned variable, or a result."""
        if isinstance(made, ast.Assign):
            for target in made.targets:
                yield from self._uses_of_targets(target)
        elif isinstance(made, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            yield from self._uses(made.target)
        elif isinstance(made, ast.Return):
            scope = self._script.scope(made)
            for call in self._script.calls():
                if scope is not None and scope in self._script.called(call):
                    yield call

    def _uses_of_targets(self, target: ast.AST) -> Iterator[ast.expr]:
        for part in ast.walk(target):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield from self._uses(part)

    def _uses(self, variable: ast.AST) -> Iterator[ast.expr]:
        """Yields the expressions that read a variable of the same scope, or an attribute."""
        scope = self._script.scope(variable)
        anywhere = isinstance(variable, ast.Attribute) or scope is None
        for use in self._loads.get(_dotted(variable), ()):
            if use is not variable and (anywhere or self._script.scope(use) is scope):
                yield use

    def _parameters(self, call: ast.Call, passed: ast.AST) -> Iterator[ast.expr]:
        """Yields the uses of the parameter to which a call passes an argument."""
        for function in self._script.called(call):
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            names = names[1:] if names[:1] == ["self"] else names
            given: list[tuple[str | None, ast.AST]] = [*zip(names, call.args, strict=False)]
            given += [(each.arg, each) for each in call.keywords]
            for name, argument in given:
                if argument is passed:
                    yield from (
                        use
                        for use in self._loads.get(name or "", ())
                        if self._script.scope(use) is function
                    )


def _dotted(node: ast.AST) -> str:
    """Returns the name of a variable or attribute, as it is written; otherwise an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        of = _dotted(node.value)
        return f"{of}.{node.attr}" if of else ""
    return ""
