"""Tracks the loaders of a script: where they are created, passed and iterated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from shoal.checking.script import Function, Loop, Script, last_name

DATA_LOADERS: Final = frozenset(
    {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
)
ELASTIC_LOADERS: Final = frozenset(
    {"shoal.ElasticDataLoader", "shoal.ElasticDataLoader.from_dataloader"}
)
_DEALS: Final = frozenset({"from_dataloader", "as_distributed", "evaluate", "prepare"})
"""Names of functions that distribute the batches of their DataLoader arguments across ranks."""
PASSES_ON: Final = frozenset({"tqdm", "trange", "track", "enumerate", "iter", "islice", "cycle"})
"""Names of functions that iterate over their first argument."""


def all_loaders(script: Script) -> Loaders:
    """Returns the DataLoaders and ElasticDataLoaders of a script, for `Script.once`."""
    return Loaders(script, DATA_LOADERS | ELASTIC_LOADERS)


class Loaders:
    """Maps names in each scope to the loaders that they may refer to."""

    def __init__(self, script: Script, kinds: frozenset[str] = DATA_LOADERS) -> None:
        """`kinds`: full names of the functions that create the loaders to track."""
        self._script = script
        self._made = set(script.calls(*kinds))
        self._names: dict[tuple[Function | None, str], set[ast.Call]] = {}
        self._returned: dict[Function, dict[int | None, set[ast.Call]]] = {}
        while self._spread():
            pass
        self.dealt = {
            loader
            for call in script.calls()
            if last_name(call) in _DEALS
            for argument in [*call.args, *(each.value for each in call.keywords)]
            for loader in self.of(argument)
        }
        """Loaders whose batches Shoal distributes."""

    def plain_loops(self) -> Iterator[tuple[Loop, set[ast.Call]]]:
        """Yields each loop that iterates over DataLoaders whose batches Shoal does not distribute,
        together with those DataLoaders."""
        for loop in self._script.of_type(ast.For, ast.AsyncFor):
            found = self.of(loop.iter) - self.dealt
            if found:
                yield loop, found

    def of(self, node: ast.AST) -> set[ast.Call]:
        """Returns the loaders that an expression may refer to."""
        if isinstance(node, ast.Call):
            if node in self._made:
                return {node}
            if last_name(node) in PASSES_ON and node.args:
                return self.of(node.args[0])
            if last_name(node) == "zip":
                return set().union(*(self.of(argument) for argument in node.args))
            if isinstance(node.func, ast.Attribute) and node.func.attr == "steps":
                return self.of(node.func.value)
            return self._results(node).get(None, set())
        if isinstance(node, ast.IfExp):
            return self.of(node.body) | self.of(node.orelse)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(self._script.scope(node), ast.unparse(node))
        if isinstance(node, ast.Subscript):
            scope = self._script.scope(node)
            return self._named(scope, ast.unparse(node)) or self._named(
                scope, f"{ast.unparse(node.value)}[]"
            )
        return set()

    def _named(self, scope: Function | None, name: str) -> set[ast.Call]:
        while True:
            if (scope, name) in self._names:
                return self._names[scope, name]
            if scope is None:
                return set()
            scope = self._script.scope(scope)

    def _results(self, call: ast.Call) -> dict[int | None, set[ast.Call]]:
        if not isinstance(call.func, ast.Name):
            return {}
        found: dict[int | None, set[ast.Call]] = {}
        for function in self._script.functions.get(call.func.id, ()):
            for place, loaders in self._returned.get(function, {}).items():
                found.setdefault(place, set()).update(loaders)
        return found

    def _spread(self) -> bool:
        """Propagates DataLoaders once through all assignments, arguments and results. Returns
        whether a new reference to a DataLoader was found. Another pass is then needed."""
        before = self._count()
        for node in self._script.of_type(ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        for annotated in self._script.of_type(ast.AnnAssign):
            if annotated.value is not None:
                self._assign(annotated.target, annotated.value)
        for call in self._script.calls():
            self._pass_arguments(call)
        for result in self._script.of_type(ast.Return):
            scope = self._script.scope(result)
            if scope is not None and result.value is not None:
                parts: list[tuple[int | None, ast.AST]] = (
                    list(enumerate(result.value.elts))
                    if isinstance(result.value, ast.Tuple)
                    else [(None, result.value)]
                )
                for place, part in parts:
                    self._add_result(scope, place, self.of(part))
        for generated in self._script.of_type(ast.Yield, ast.YieldFrom):
            scope = self._script.scope(generated)
            if scope is not None:
                for source in self._yielded(generated):
                    self._add_result(scope, None, self.of(source))
        return self._count() > before

    def _yielded(self, generated: ast.Yield | ast.YieldFrom) -> Iterator[ast.AST]:
        """Yields the iterables whose items a `yield` may pass on."""
        if isinstance(generated, ast.YieldFrom):
            yield generated.value
        elif isinstance(generated.value, ast.Call) and last_name(generated.value) == "next":
            yield from generated.value.args[:1]
        for above in self._script.above(generated):
            if isinstance(above, Function):
                return
            if isinstance(above, ast.For | ast.AsyncFor):
                yield above.iter

    def _add_result(self, function: Function, place: int | None, loaders: set[ast.Call]) -> None:
        if loaders:
            self._returned.setdefault(function, {}).setdefault(place, set()).update(loaders)

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                for one, its_value in zip(target.elts, value.elts, strict=True):
                    self._assign(one, its_value)
            elif isinstance(value, ast.Call):
                results = self._results(value)
                for place, one in enumerate(target.elts):
                    self._add(self._script.scope(one), one, results.get(place, set()))
        elif isinstance(value, ast.Dict):
            for key, one in zip(value.keys, value.values, strict=True):
                if key is not None:
                    name = f"{ast.unparse(target)}[{ast.unparse(key)}]"
                    self._add_name(self._script.scope(target), name, self.of(one))
        elif isinstance(value, ast.DictComp | ast.ListComp):
            made = self.of(value.value if isinstance(value, ast.DictComp) else value.elt)
            self._add_name(self._script.scope(target), f"{ast.unparse(target)}[]", made)
        else:
            self._add(self._script.scope(target), target, self.of(value))

    def _pass_arguments(self, call: ast.Call) -> None:
        if not any(map(self.of, (*call.args, *(each.value for each in call.keywords)))):
            return
        for function in self._script.called(call):
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if names[:1] == ["self"]:
                names = names[1:]
            given = [*zip(names, call.args, strict=False)]
            given += [(each.arg, each.value) for each in call.keywords if each.arg]
            for name, argument in given:
                if loaders := self.of(argument):
                    self._names.setdefault((function, name), set()).update(loaders)

    def _add(self, scope: Function | None, target: ast.AST, loaders: set[ast.Call]) -> None:
        if isinstance(target, ast.Attribute):
            self._add_name(None, ast.unparse(target), loaders)  # other methods use it as well
        elif isinstance(target, ast.Name | ast.Subscript):
            self._add_name(scope, ast.unparse(target), loaders)

    def _add_name(self, scope: Function | None, name: str, loaders: set[ast.Call]) -> None:
        if loaders:
            self._names.setdefault((scope, name), set()).update(loaders)

    def _count(self) -> int:
        returned = [loaders for each in self._returned.values() for loaders in each.values()]
        return sum(map(len, self._names.values())) + sum(map(len, returned))
