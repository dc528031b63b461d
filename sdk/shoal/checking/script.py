"""A parsed training script: imported names, reachable functions, guarded lines, training loops."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, overload

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
_A = TypeVar("_A", bound=ast.AST)
_B = TypeVar("_B", bound=ast.AST)
_C = TypeVar("_C", bound=ast.AST)
_Result = TypeVar("_Result")

_ONE_PROCESS: Final = frozenset({"rank", "main", "master", "primary", "leader", "chief", "zero"})
"""Words that suggest that a condition selects one process."""
_ONE_PROCESS_ARGUMENTS: Final = frozenset({"should_save", "should_log"})
"""Attributes of transformers' arguments that are true in one process."""
_HOOKS: Final = re.compile(
    r"on_\w+|(training|validation|test|predict)_step|forward|setup|teardown|configure_\w+"
    r"|(train|val|test|predict)_dataloader|compute_loss|compute_metrics|log"
)
"""Methods that a Trainer calls on every rank."""
_WITH_HOOKS: Final = re.compile(
    r"(transformers|trl|lightning|pytorch_lightning)\..+|shoal\.integ.+"
)
"""Classes of libraries with a Trainer."""
_MAIN_FIRST: Final = ("main_first", "main_process_first", "local_main_process_first")
_TRAINING_CALLS: Final = frozenset({"backward", "train_step"})
_DEEPEST: Final = 100
"""Depth to which the expressions of a statement are analysed. Recursive functions, such as
`ast.unparse`, call several functions for each level."""


class Script:
    """One source file, parsed and analysed."""

    def __init__(self, source: str, name: str = "<script>") -> None:
        """Parses the source. Raises SyntaxError."""
        self.tree = _parsed(source, name)
        self.lines = source.splitlines()
        self._parents = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }
        self._by_type: dict[tuple[type[ast.AST], ...], list[ast.AST]] = {}
        self._scopes: dict[ast.AST, Function | None] = {self.tree: None}
        for child, parent in self._parents.items():  # ancestors first
            if isinstance(parent, Function) and child in parent.body:
                self._scopes[child] = parent
            else:
                self._scopes[child] = self._scopes.get(parent)
        self._computed: dict[Callable[[Script], Any], Any] = {}
        self._imports = _imported(self.tree)
        self.functions: dict[str, list[Function]] = {}
        """Functions and methods of the script by their bare names."""
        for node in self.of_type(ast.FunctionDef, ast.AsyncFunctionDef):
            self.functions.setdefault(node.name, []).append(node)
        self.classes = {node.name: node for node in self.of_type(ast.ClassDef)}
        self._training_nodes = self._find_training_nodes()
        self._flags = self._named_after_ranks()
        self.unguarded_scopes = self._find_unguarded_scopes()
        """Scopes executed by every worker: the module (None), the hooks of Trainers, and the
        functions called from these without a condition on the rank."""

    # ---------------------------------------------------------------------------------------- nodes

    @overload
    def of_type(self, first: type[_A], /) -> Iterator[_A]: ...
    @overload
    def of_type(self, first: type[_A], second: type[_B], /) -> Iterator[_A | _B]: ...
    @overload
    def of_type(
        self, first: type[_A], second: type[_B], third: type[_C], /
    ) -> Iterator[_A | _B | _C]: ...

    def of_type(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Returns all nodes of the given kinds, ordered by line."""
        if kinds not in self._by_type:
            found = [node for node in (self.tree, *self._parents) if isinstance(node, kinds)]
            found.sort(key=lambda node: getattr(node, "lineno", 0))
            self._by_type[kinds] = found
        return iter(self._by_type[kinds])

    def once(self, compute: Callable[[Script], _Result]) -> _Result:
        """Returns the result of a function of the script, which is called only once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        result: _Result = self._computed[compute]
        return result

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yields all calls to functions with one of the full names `names`, or all calls if no
        names are given."""
        for call in self.of_type(ast.Call):
            if not names or self.full_name(call.func) in names:
                yield call

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the ancestors of a node, innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def until(self, node: ast.AST, end: ast.AST) -> Iterator[ast.AST]:
        """Yields the ancestors of a node, innermost first, up to the ancestor `end`."""
        return itertools.takewhile(lambda above: above is not end, self.above(node))

    def loop_around(self, node: ast.AST) -> Loop | None:
        """Returns the innermost loop that contains a node and is in the same function."""
        for above in self.above(node):
            if isinstance(above, Function):
                return None
            if isinstance(above, Loop):
                return above
        return None

    def statement(self, node: ast.AST) -> ast.stmt:
        """Returns the innermost statement that is or contains the node."""
        return next(each for each in (node, *self.above(node)) if isinstance(each, ast.stmt))

    def scope(self, node: ast.AST) -> Function | None:
        """Returns the innermost function whose body contains the node; None for the module."""
        return self._scopes[node]

    def full_name(self, node: ast.AST) -> str:
        """Returns the dotted name of an expression with imports resolved, such as
        torch.distributed.all_reduce; empty if the expression is not a name."""
        if isinstance(node, ast.Name):
            return self._imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            of = self.full_name(node.value)
            return f"{of}.{node.attr}" if of else ""
        return ""

    def uses(self, variable: ast.Name) -> Iterator[ast.Name]:
        """Yields the places that read a variable: in its own scope and, if it is the module's, in
        functions that have no variable of this name."""
        scope = self.scope(variable)
        named = [node for node in self.of_type(ast.Name) if node.id == variable.id]
        own = {self.scope(node) for node in named if not isinstance(node.ctx, ast.Load)}
        own |= {
            function
            for function in self.of_type(ast.FunctionDef, ast.AsyncFunctionDef)
            for each in ast.walk(function.args)
            if isinstance(each, ast.arg) and each.arg == variable.id
        }
        for node in named:
            within = self.scope(node)
            if isinstance(node.ctx, ast.Load) and (
                within is scope or (scope is None and within not in own)
            ):
                yield node

    def imports(self, package: str) -> bool:
        """Returns whether the script imports the package or a name from it."""
        return any(
            name == package or name.startswith(f"{package}.") for name in self._imports.values()
        )

    # --------------------------------------------------------------------------------------- guards

    def runs_on_all_ranks(self, node: ast.AST) -> bool:
        """Returns whether it is certain that every worker runs the node."""
        return self.scope(node) in self.unguarded_scopes and not self._is_guarded(node)

    def mentions_rank(self, node: ast.AST) -> bool:
        """Returns whether an expression seems to depend on the rank, judged by the names in it."""
        return any(
            _words(name) & _ONE_PROCESS or name in self._flags or name in _ONE_PROCESS_ARGUMENTS
            for name in _names_in(node)
        )

    def _is_guarded(self, node: ast.AST) -> bool:
        below = node
        for parent in self.above(node):
            if isinstance(parent, ast.If | ast.IfExp | ast.While):
                if below is not parent.test and self.mentions_rank(parent.test):
                    return True
                if isinstance(parent, ast.If) and self._is_instead_of_training(below, parent):
                    return True
            elif isinstance(parent, ast.BoolOp):
                if self.mentions_rank(parent.values[0]) and below is not parent.values[0]:
                    return True
            elif isinstance(parent, ast.With | ast.AsyncWith):
                if any(last_name(item.context_expr) in _MAIN_FIRST for item in parent.items):
                    return True
            elif isinstance(parent, ast.ExceptHandler):
                return True  # an error usually occurs in a single worker
            if isinstance(below, ast.stmt) and self._follows_exit(below, parent):
                return True
            if isinstance(parent, Function):
                return any(self.mentions_rank(mark) for mark in parent.decorator_list)
            below = parent
        return False

    def _is_instead_of_training(self, node: ast.AST, branches: ast.If) -> bool:
        """Returns whether the branch of an `if` that contains `node` runs instead of training: it
        does not train, and either the other branch trains or this branch ends with `return`."""
        own, other = branches.body, branches.orelse
        if node in other:
            own, other = other, own
        if node not in own or any(self.trains(part) for part in own):
            return False
        return isinstance(own[-1], ast.Return) or any(self.trains(part) for part in other)

    def _follows_exit(self, node: ast.stmt, parent: ast.AST) -> bool:
        """Returns whether an earlier statement of the block may exit the block on some ranks. Some
        ranks then do not reach `node`."""
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and node in block:
                return any(
                    isinstance(before, ast.If)
                    and self.mentions_rank(before.test)
                    and isinstance(before.body[-1], ast.Return | ast.Continue | ast.Raise)
                    for before in block[: block.index(node)]
                )
        return False

    def _named_after_ranks(self) -> set[str]:
        """Returns the names of variables that store a condition on the rank."""
        self._flags = set()
        for node in self.of_type(ast.Assign):
            value = node.value
            if isinstance(value, ast.IfExp):
                value = value.test
            elif isinstance(value, ast.Call):
                value = value.func
            if isinstance(
                value, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Name | ast.Attribute
            ) and self.mentions_rank(value):
                self._flags |= {
                    target.id for target in node.targets if isinstance(target, ast.Name)
                }
        return self._flags

    def _find_unguarded_scopes(self) -> set[Function | None]:
        by_scope: dict[Function | None, list[ast.Call]] = {}
        for call in self.calls():
            if not self._is_guarded(call):
                by_scope.setdefault(self.scope(call), []).append(call)
        found: set[Function | None] = {None, *self._hooks()}
        left = [*found]
        while left:
            for call in by_scope.get(left.pop(), ()):
                for function in self.called(call):
                    if function not in found:
                        found.add(function)
                        left.append(function)
        return found

    def _hooks(self) -> Iterator[Function]:
        """Yields the methods of callbacks, modules and Trainers that a library's Trainer calls on
        every rank."""
        for made in self.classes.values():
            if any(_WITH_HOOKS.fullmatch(self.full_name(base)) for base in made.bases):
                yield from (
                    part
                    for part in made.body
                    if isinstance(part, Function) and _HOOKS.fullmatch(part.name)
                )

    def called(self, call: ast.Call) -> Iterator[Function]:
        """Yields the functions of the script that a call may execute, including functions passed to
        it by name."""
        if isinstance(call.func, ast.Name):
            if call.func.id in self.classes:
                yield from (
                    part
                    for part in self.classes[call.func.id].body
                    if isinstance(part, Function) and part.name == "__init__"
                )
            yield from self.functions.get(call.func.id, ())
        elif isinstance(call.func, ast.Attribute):
            yield from (
                function
                for function in self.functions.get(call.func.attr, ())
                if isinstance(self._parents[function], ast.ClassDef)
            )
        for argument in call.args:
            if isinstance(argument, ast.Name):
                yield from self.functions.get(argument.id, ())

    # ------------------------------------------------------------------------------------- training

    def trains(self, node: ast.AST) -> bool:
        """Returns whether the code in a node computes gradients, directly or in a function of the
        script that it calls."""
        return node in self._training_nodes

    def _find_training_nodes(self) -> set[ast.AST]:
        callers: dict[Function, list[ast.Call]] = {}
        left: list[ast.Call] = []
        for call in self.calls():
            if isinstance(call.func, ast.Attribute) and call.func.attr in _TRAINING_CALLS:
                left.append(call)
            for function in self.called(call):
                callers.setdefault(function, []).append(call)
        found = set[ast.AST]()
        while left:
            call = left.pop()
            for node in (call, *self.above(call)):
                if node in found:
                    break
                found.add(node)
                if isinstance(node, Function):
                    left += callers.get(node, ())
        return found

    def training_loops(self) -> list[Loop]:
        """Returns the outermost training loops of each scope."""
        return self.once(Script._outermost_training_loops)

    def _outermost_training_loops(self) -> list[Loop]:
        loops = [
            loop for loop in self.of_type(ast.For, ast.AsyncFor, ast.While) if self.trains(loop)
        ]
        return [
            loop
            for loop in loops
            if not any(
                above in loops and self.scope(above) is self.scope(loop)
                for above in self.above(loop)
            )
        ]

    def is_in_training_loop(self, node: ast.AST) -> bool:
        """Returns whether the node is in the body of a training loop."""
        return any(isinstance(above, Loop) and self.trains(above) for above in self.above(node))


def _parsed(source: str, name: str) -> ast.Module:
    """Returns the syntax tree of a script. Parts of expressions that are nested too deeply, as in a
    sum of hundreds of terms, are replaced by `...`. Raises SyntaxError."""
    try:
        tree = ast.parse(source, name)
    except (RecursionError, MemoryError) as error:
        raise SyntaxError(
            "an expression is nested too deeply to be parsed", (name, 1, 1, None)
        ) from error
    left: list[tuple[ast.AST, int]] = [(tree, 0)]
    while left:
        node, depth = left.pop()
        for field, value in ast.iter_fields(node):
            if depth == _DEEPEST and isinstance(value, ast.expr):
                setattr(node, field, _left_out(value))
            elif depth == _DEEPEST and isinstance(value, list):
                value[:] = [
                    _left_out(each) if isinstance(each, ast.expr) else each for each in value
                ]
        left += (
            (child, 0 if isinstance(child, ast.stmt) else min(depth + 1, _DEEPEST))
            for child in ast.iter_child_nodes(node)
        )
    return tree


def _left_out(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant | ast.Name | ast.JoinedStr | ast.FormattedValue):
        return node  # the last two are needed to print a string; their parts are replaced
    return ast.copy_location(ast.Constant(...), node)


def same_code(one: object, other: object) -> bool:
    """Returns whether two syntax trees are equal except for positions."""
    left = [(one, other)]
    while left:
        mine, its = left.pop()
        if type(mine) is not type(its):
            return False
        if isinstance(mine, ast.AST):
            left += [(getattr(mine, name, None), getattr(its, name, None)) for name in mine._fields]
        elif isinstance(mine, list) and isinstance(its, list):
            if len(mine) != len(its):
                return False
            left += zip(mine, its, strict=True)
        elif mine != its:
            return False
    return True


def _imported(tree: ast.AST) -> dict[str, str]:
    """Returns a mapping from the names that a script imports to their full dotted names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _names_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and part.value in ("RANK", "LOCAL_RANK"):
            yield part.value  # environment variables


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, such as `step` for `optimizer.step`. For a call,
    returns the last part of the called function's name. Empty if there is no name."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def words_in(node: ast.AST) -> set[str]:
    """Returns all words in the names of an expression, in lower case."""
    return set().union(*(_words(name) for name in _names_in(node)))


def is_no_grad(node: ast.AST) -> bool:
    """Returns whether a context manager or decorator turns gradients off."""
    return last_name(node) in ("no_grad", "inference_mode")


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Returns the argument of a call at position `place` or with the keyword `name`; None if there
    is none."""
    if place < len(call.args):
        return call.args[place]
    return next((each.value for each in call.keywords if each.arg == name), None)


def assigned(made: ast.Assign | ast.AnnAssign) -> Iterator[tuple[str, ast.AST]]:
    """Yields each assigned name with its value, including for `a, b = 0, 1` and `a: int = 0`."""
    if made.value is None:
        return
    for target in made.targets if isinstance(made, ast.Assign) else (made.target,):
        if isinstance(target, ast.Name):
            yield target.id, made.value
        elif isinstance(target, ast.Tuple):
            values = made.value.elts if isinstance(made.value, ast.Tuple) else ()
            for name, value in itertools.zip_longest(
                target.elts, values[: len(target.elts)], fillvalue=made.value
            ):
                if isinstance(name, ast.Name):
                    yield name.id, value


def is_name(node: ast.AST, name: str) -> bool:
    """Returns whether a node is the variable `name`."""
    return isinstance(node, ast.Name) and node.id == name


def has_name(node: ast.AST, name: str) -> bool:
    """Returns whether the variable `name` occurs in a node."""
    return any(is_name(part, name) for part in ast.walk(node))
