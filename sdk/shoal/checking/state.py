"""Rules of `shoal check` about state: values, learning rates, copies of the model, averages and
schedulers that differ between workers, or that are wrong after a join or a resume. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Final

from shoal.checking.findings import Finding, finding
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
from shoal.checking.sources import Sources, over_epochs
from shoal.checking.steps import (
    OPTIMIZER_WORDS,
    OPTIMIZERS,
    additions,
    assigned_values,
    counters,
    distributed_names,
    incremented,
    increments,
    steps_in,
    sums_of_losses,
)

SCHEDULES: Final = re.compile(r"torch\.optim\.lr_scheduler\.\w+|transformers\.get_\w*schedule\w*")
_STEP_NAMES: Final = frozenset({"step", "steps", "iteration", "iterations", "iter", "batches"})
_BEST: Final = (
    "; to keep the best checkpoint, shoal.save_checkpoint(directory, best=..., mode=...) needs no "
    "variable"
)


def _values(script: Script) -> Iterator[Finding]:
    of_rates = {ast.unparse(use) for use in _counters_of_rates(script)}
    for loop in script.training_loops():
        decide = [*_carried_values(script, loop)]
        known = of_rates | {name for _, name, _ in decide}
        read = [
            (made, name, value)
            for made, name, value in _plain_values(script, loop)
            if name not in known and _is_read_count(script, loop, name)
        ]
        added = [
            (made, name, value)
            for made, name, value in _plain_values(script, loop)
            if name not in known | {each for _, each, _ in read} and _is_sum(script, loop, name)
        ]
        found = [(*each, "depends on {}") for each in decide]
        found += [(*each, "reads {}, the script's own count") for each in read]
        found += [(*each, "adds to {}") for each in added]
        steps = {name for _, name, *_ in found if _counts_steps(script, loop, name)}
        # one call for all values: a second one would replace `run`
        all_values = {name: ast.unparse(value) for _, name, value, _ in found if name not in steps}
        call = ", ".join(f"{name}={value}" for name, value in all_values.items())
        for made, name, value, use in found:
            yield finding(
                made,
                f"the training loop {use.format(name)}, but a worker that joins later starts with "
                f"{name} = {ast.unparse(value)}",
                "loader.global_step, which counts the run's steps, instead of the script's own "
                "counter"
                if name in steps
                else f"run = shoal.register_state({call}), and run.{name} in the loop"
                + (_BEST if "best" in name.lower().split("_") else ""),
            )


def _carried_values(script: Script, loop: Loop) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yields each variable that starts with a plain value and that the training loop updates and
    compares: the assignment before the loop, the name and the value."""
    for made, name, value in _plain_values(script, loop):
        if _decides(script, loop, name):
            yield made, name, value


def _plain_values(script: Script, loop: Loop) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yields each plain value that the loop's scope assigns before the loop: the assignment, the
    name and the value."""
    scope = script.scope(loop)
    block = script.tree.body if scope is None else scope.body
    for made in (node for part in block for node in ast.walk(part)):
        if (
            isinstance(made, ast.Assign | ast.AnnAssign)
            and made.lineno < loop.lineno
            and script.scope(made) is scope
        ):
            for name, value in assigned(made):
                if _is_plain(value):
                    yield made, name, value


def _is_read_count(script: Script, loop: Loop, name: str) -> bool:
    """Returns whether a loop increments a variable by a constant, never sets it to another value
    unconditionally, and reads it elsewhere."""
    counted = read = False
    for node in ast.walk(loop):
        if isinstance(node, ast.stmt) and incremented(node) == name:
            counted = True
        elif isinstance(node, ast.Assign | ast.AnnAssign) and name in dict(assigned(node)):
            if not any(isinstance(above, ast.If) for above in script.until(node, loop)):
                return False  # starts again in each epoch, for example
        elif is_name(node, name) and isinstance(getattr(node, "ctx", None), ast.Load):
            read = read or incremented(script.statement(node)) != name
    return counted and read


_TIMES: Final = frozenset({"time", "times", "timer", "seconds", "elapsed", "duration", "perf"})
"""Words in expressions for times, which belong to one process."""


def _is_sum(script: Script, loop: Loop, name: str) -> bool:
    """Returns whether the iterations of an outer training loop add to a variable that the script
    reads there or after the loop, and that no iteration resets unconditionally. Sums of times do
    not count, nor do those that `sums_of_losses` yields."""
    if loop not in script.once(Sources).outer_loops() or name in {
        each for _, each in sums_of_losses(script)
    }:
        return False
    scope = script.scope(loop)
    added = {
        adding
        for adding, each, value in additions(script)
        if each == name and loop in script.above(adding) and not words_in(value) & _TIMES
    }
    read = False
    for node in script.of_type(ast.Name):
        if node.id != name or script.scope(node) is not scope or node.lineno < loop.lineno:
            continue
        statement = script.statement(node)
        if isinstance(node.ctx, ast.Load):
            read = read or statement not in added
        elif statement not in added and _is_unconditional(script, statement, loop):
            return False
    return bool(added) and read


def _is_unconditional(script: Script, node: ast.AST, loop: Loop) -> bool:
    """Returns whether each iteration of a loop executes a node of it."""
    above = [*script.above(node)]
    return loop in above and not any(
        isinstance(each, ast.If) for each in above[: above.index(loop)]
    )


_ADDS: Final = frozenset({"append", "extend", "insert", "add"})
_EMPTY: Final = frozenset({"list", "dict", "set", "defaultdict", "OrderedDict"})


def _collections(script: Script) -> Iterator[Finding]:
    """Reports lists, dictionaries and sets that grow during the run, and that the script reads
    within the training loop or after it."""
    sources = script.once(Sources)
    samples = {origin.loop for origin in sources.without_loader() if origin.collected}
    known = script.once(_registered) | {name for _, name in sums_of_losses(script)}
    for loop in sources.outer_loops():
        executed = {*ast.walk(loop), *sources.executed_by[loop]}
        if executed & samples:
            continue
        for made in script.of_type(ast.Assign, ast.AnnAssign):
            scope = script.scope(made)
            above = made.lineno < loop.lineno if scope is script.scope(loop) else scope is None
            if not above or script.is_in_training_loop(made):
                continue
            for name, value in assigned(made):
                variable = next(node for node in ast.walk(made) if is_name(node, name))
                assert isinstance(variable, ast.Name)
                if (
                    name not in known
                    and _is_empty(value)
                    and _grows(script, variable, loop, executed)
                ):
                    yield finding(
                        made,
                        f"the training loop adds to {name}, but a worker that joins later starts "
                        f"with {name} = {ast.unparse(value)}",
                        f"shoal.register_state({name}={name}) above the loop, and the same changes "
                        "on every rank; for numbers of each step, rather shoal.report(...)",
                    )


def _is_empty(value: ast.AST) -> bool:
    """Returns whether a value is an empty collection, or contains only empty ones and, in a
    dictionary, numbers."""
    if isinstance(value, ast.List):
        return all(map(_is_empty, value.elts))
    if isinstance(value, ast.Dict | ast.DictComp):
        values = value.values if isinstance(value, ast.Dict) else [value.value]
        return all(_is_empty(each) or _is_plain(each) for each in values)
    if isinstance(value, ast.ListComp):
        return _is_empty(value.elt)
    return (
        isinstance(value, ast.Call)
        and last_name(value) in _EMPTY
        and (last_name(value) == "defaultdict" or not (value.args or value.keywords))
    )


def _grows(script: Script, variable: ast.Name, loop: Loop, executed: set[ast.AST]) -> bool:
    """Returns whether a training loop, which executes the nodes `executed`, adds to a collection
    that the script reads there or later, and that no iteration empties unconditionally."""
    scope = script.scope(variable)
    added = read = False
    for node in executed:
        if is_name(node, variable.id) and script.scope(node) is scope:
            if isinstance(script.statement(node), ast.AugAssign):
                added = added or not isinstance(getattr(node, "ctx", None), ast.Load)
            elif isinstance(getattr(node, "ctx", None), ast.Store) and _is_unconditional(
                script, node, loop
            ):
                return False
    for use in script.uses(variable):
        change = _change(script, use) if use in executed else ""
        if change == "clear" and _is_unconditional(script, use, loop):
            return False
        added = added or change == "add"
        later = use.lineno > loop.lineno or script.scope(use) is not script.scope(loop)
        read = read or (not change and later)
    return added and read


def _change(script: Script, use: ast.Name) -> str:
    """Returns "add" if the use of a collection adds to it, "set" if it overwrites an item, fills a
    cache or adds a time, "clear" if it empties the collection; otherwise an empty string."""
    part: ast.AST = use
    for above in script.above(use):
        if isinstance(above, ast.Attribute) and above.attr in (*_ADDS, "clear"):
            if above.attr == "clear":
                return "clear"
            return "set" if words_in(script.statement(use)) & _TIMES else "add"
        if isinstance(above, ast.Subscript) and isinstance(above.ctx, ast.Store):
            if isinstance(script.statement(above), ast.AugAssign):
                return "add"
            return "add" if _is_new_key(script, above, use.id) else "set"
        if getattr(above, "func" if isinstance(above, ast.Call) else "value", None) is not part:
            break
        part = above
    return ""


def _is_new_key(script: Script, item: ast.Subscript, name: str) -> bool:
    """Returns whether each iteration of a training loop may assign another item of a collection:
    the key is neither constant nor that of an inner loop, and the collection is no cache."""
    inner = {
        part.id
        for above in script.above(item)
        if isinstance(above, ast.For) and not script.trains(above)
        for part in ast.walk(above.target)
        if isinstance(part, ast.Name)
    }
    cached = any(
        isinstance(above, ast.If)
        and any(
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.In | ast.NotIn)
            and is_name(test.comparators[0], name)
            for test in ast.walk(above.test)
        )
        for above in script.above(item)
    )
    return not cached and any(
        isinstance(part, ast.Name) and part.id not in inner for part in ast.walk(item.slice)
    )


def _counts_steps(script: Script, loop: Loop, name: str) -> bool:
    """Returns whether a variable counts the steps of a loop, or seems to, judged by its name."""
    return bool(set(name.lower().split("_")) & _STEP_NAMES) or increments(script, [loop], name)


def _learning_rates(script: Script) -> Iterator[Finding]:
    reported = {
        name for loop in script.training_loops() for _, name, _ in _carried_values(script, loop)
    }
    for use in _counters_of_rates(script):
        name = ast.unparse(use)
        if name not in reported:
            yield finding(
                use,
                f"the learning rate depends on `{name}`, the script's own counter of steps, which "
                "starts afresh in a worker that joins later and after a resume, and includes "
                "aborted steps",
                "compute it from loader.global_step, the number of committed steps",
            )


def _counters_of_rates(script: Script) -> Iterator[ast.Name | ast.Attribute]:
    """Yields the script's own counters of steps from which it computes a learning rate."""
    for node in script.of_type(ast.Assign, ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            if _is_learning_rate(script, target):
                yield from counters(script, node.value)


def _is_learning_rate(script: Script, target: ast.AST) -> bool:
    """Returns whether an assignment sets the learning rate of an optimizer's parameter group."""
    if not (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == "lr"
    ):
        return False
    groups = {
        each.id
        for loop in script.of_type(ast.For)
        if "param_groups" in ast.unparse(loop.iter)
        for each in ast.walk(loop.target)
        if isinstance(each, ast.Name)
    }
    return "param_groups" in ast.unparse(target.value) or ast.unparse(target.value) in groups


def _is_plain(value: ast.AST) -> bool:
    """Returns whether a value is a literal number or None."""
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, ast.Constant):
        return value.value is None or (
            isinstance(value.value, int | float) and not isinstance(value.value, bool)
        )
    if isinstance(value, ast.Name | ast.Attribute):
        return last_name(value) in ("inf", "Inf", "maxsize")
    return bool(re.fullmatch(r"""float\(['"][-+]?inf(inity)?['"]\)""", ast.unparse(value)))


def _decides(script: Script, loop: Loop, name: str) -> bool:
    """Returns whether the variable `name` carries a value from one iteration of the loop to the
    next and the loop compares it (with an operator, `max` or `min`). The best loss so far is an
    example."""
    if name in {
        part.id
        for part in ast.walk(getattr(loop, "target", ast.Pass()))
        if isinstance(part, ast.Name)
    }:
        return False
    carried = compared = False
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and is_name(node.target, name):
            carried = True
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (
            value := dict(assigned(node)).get(name)
        ):
            if node in loop.body and not has_name(value, name):
                return False  # every iteration starts with a new value
            chosen = any(isinstance(above, ast.If) for above in script.until(node, loop))
            carried = carried or chosen or has_name(value, name)
            if isinstance(value, ast.Call) and last_name(value) in ("max", "min"):
                compared = compared or has_name(value, name)
        elif isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            compared = compared or has_name(node, name)
    return carried and compared


def _registered(script: Script) -> set[str]:
    """Returns the variables that the script passes to register_state or as_distributed."""
    return {
        part.id
        for call in script.calls()
        if last_name(call) in ("register_state", "as_distributed")
        for each in (*call.args, *call.keywords)
        for part in ast.walk(each)
        if isinstance(part, ast.Name)
    }


def _copies(script: Script) -> Iterator[Finding]:
    registered = script.once(_registered)
    loops = script.training_loops()
    own_averages = {
        call
        for call in script.calls()
        if words_in(call.func) & {"ema", "moving"}
        and (last_name(call) in script.classes or script.full_name(call.func).startswith("timm."))
    } - {*averages(script)}
    for made in script.of_type(ast.Assign):
        target, value = made.targets[0], made.value
        while isinstance(value, ast.Call) and last_name(value) in ("eval", "to", "requires_grad_"):
            assert isinstance(value.func, ast.Attribute)
            value = value.func.value
        if (
            isinstance(target, ast.Name)
            and isinstance(value, ast.Call)
            and (script.full_name(value.func) == "copy.deepcopy" or value in own_averages)
            and value.args
            and isinstance(value.args[0], ast.Name | ast.Attribute)
            and target.id not in registered
            and not script.is_in_training_loop(made)
            and any(has_name(loop, target.id) for loop in loops)
        ):
            yield finding(
                made,
                f"the loop updates the copy {target.id}, but a worker that joins later starts "
                "with a fresh copy",
                f"shoal.register_state({target.id}={target.id}), or "
                "torch.optim.swa_utils.AveragedModel, which is registered automatically",
            )


EARLY_AVERAGE: Final = (
    "an average created above as_distributed copies the model before it has this rank's device and "
    "rank 0's weights"
)


def _averages(script: Script) -> Iterator[Finding]:
    distributed: list[ast.AST] = [
        call for call in script.calls() if last_name(call).startswith("as_distributed")
    ]
    # as_distributed cannot come before the optimizer
    later = distributed or [
        node
        for node in script.of_type(ast.Assign)
        if any(
            isinstance(target, ast.Name | ast.Attribute) and words_in(target) & OPTIMIZER_WORDS
            for target in node.targets
        )
    ]
    for made in averages(script):
        if _is_of_other_model(
            made, distributed or [getattr(node, "value", node) for node in later]
        ):
            continue
        if not script.is_in_training_loop(made) and any(
            script.scope(node) is script.scope(made) and getattr(node, "lineno", 0) > made.lineno
            for node in later
        ):
            yield finding(
                made,
                EARLY_AVERAGE,
                "create it after `model, optimizer = shoal.as_distributed(model, optimizer)`, from "
                "model, and call update_parameters(model) in `if optimizer.step():`: "
                "docs/guides/averages.md",
            )


def _is_of_other_model(average: ast.Call, trained: list[ast.AST]) -> bool:
    """Returns whether an average is of a model that none of the expressions `trained` contains,
    such as a frozen teacher. These call as_distributed, or create an optimizer."""
    model = argument(average, 0, "model")
    models = [
        part
        for each in trained
        if isinstance(each, ast.Call)
        for part in ast.walk(each)
        if isinstance(part, ast.Name | ast.Attribute)
    ]
    shown = any(last_name(part) in ("as_distributed", "parameters") for part in models)
    return (
        isinstance(model, ast.Name | ast.Attribute)
        and shown
        and ast.unparse(model) not in map(ast.unparse, models)
    )


def averages(script: Script) -> Iterator[ast.Call]:
    """Yields the calls that create an AveragedModel of torch, or an object of a subclass."""
    names = {
        node.name
        for node in script.of_type(ast.ClassDef)
        if any(script.full_name(base) == AVERAGED_MODEL for base in node.bases)
    }
    yield from script.calls(AVERAGED_MODEL, *names)


AVERAGED_MODEL: Final = "torch.optim.swa_utils.AveragedModel"


def _made_in_loops(script: Script) -> Iterator[Finding]:
    for call in script.calls():
        name = script.full_name(call.func)
        kind = (
            "scheduler"
            if SCHEDULES.fullmatch(name)
            else "optimizer"
            if OPTIMIZERS.fullmatch(name)
            else ""
        )
        if kind and script.is_in_training_loop(call):
            yield finding(
                call,
                f"{kind} created within the training loop: its state is reset in every "
                "iteration, and in workers that join later",
                f"create the {kind} once, before the loop",
            )


_EPOCH_STEPS: Final = "docs/guides/side-effects.md#after-sigterm"


def _epoch_schedules(script: Script) -> Iterator[Finding]:
    """Reports schedulers that step after each epoch of a run that may be stopped within one."""
    if not any(script.calls("shoal.resume")):
        return
    schedulers = {
        ast.unparse(target)
        for made in script.of_type(ast.Assign)
        if isinstance(made.value, ast.Call)
        and SCHEDULES.fullmatch(script.full_name(made.value.func))
        for target in made.targets
    }
    for call in script.calls():
        loop = script.loop_around(call)
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "step"
            and ast.unparse(call.func.value) in schedulers
            and loop is not None
            and over_epochs(loop)
            and not steps_in(script, loop)
            and not any(isinstance(above, ast.If) for above in script.until(call, loop))
            and any(script.trains(part) and part.lineno < call.lineno for part in loop.body)
        ):
            yield finding(
                call,
                "if the run is stopped within an epoch, the scheduler steps, and steps again when "
                "the resumed run has finished the epoch",
                "`if loader.global_step == (epoch + 1) * len(loader):` before it, where loader is "
                f"the training loader: {_EPOCH_STEPS}",
            )


_LOADS: Final = frozenset(
    {"load_full", "load_state_dict", "load_model", "deserialize", "with_parameters"}
)
"""Methods of a distributed model or optimizer that replace its state."""


def _loads_between_loops(script: Script) -> Iterator[Finding]:
    models, optimizers = script.once(distributed_names)
    for call in script.calls():
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in _LOADS
            and ast.unparse(call.func.value).removesuffix(".module") in models | optimizers
            and _is_between_loops(script, call)
            and not any(
                isinstance(above, ast.If) and "is_joining" in ast.unparse(above.test)
                for above in script.above(call)
            )
        ):
            yield finding(
                call,
                f"{last_name(call)}() between two training loops: a worker that joins in the later "
                "loop, or a run that resumes there, overwrites the state that it has received",
                "`if loader.global_step == n and not shoal.is_joining():` before it, where n is "
                "the number of steps of the loops above it: "
                "docs/guides/side-effects.md#load-the-best-model-at-the-end",
            )


def _is_between_loops(script: Script, node: ast.AST) -> bool:
    """Returns whether a training loop precedes a node, and another one follows it, in a block that
    contains all three."""
    below: ast.AST = script.statement(node)
    for above in script.above(below):
        for _, block in ast.iter_fields(above):
            if isinstance(block, list) and below in block:
                at = block.index(below)
                if all(
                    any(_has_training_loop(script, part) for part in parts)
                    for parts in (block[:at], block[at + 1 :])
                ):
                    return True
        if isinstance(above, Loop | Function):
            return False
        below = above
    return False


def _has_training_loop(script: Script, part: ast.AST) -> bool:
    """Returns whether a statement executes a training loop."""
    if isinstance(part, Function | ast.ClassDef):
        return False
    loops = script.training_loops()
    return any(
        node in loops
        or (
            isinstance(node, ast.Call)
            and any(script.scope(loop) in {*script.called(node)} for loop in loops)
        )
        for node in ast.walk(part)
    )


def _prefixed_names(script: Script) -> Iterator[Finding]:
    """Reports files with a model's state dict whose names differ from those of the plain model."""
    if any(each.value == "module." for each in script.of_type(ast.Constant)):
        return  # the script removes or expects the prefix
    models, _ = script.once(distributed_names)
    distributed = [
        call.lineno for call in script.calls() if last_name(call).startswith("as_distributed")
    ]
    models = models | {
        ast.unparse(target)
        for made in script.of_type(ast.Assign)
        for call in ast.walk(made.value)
        if isinstance(call, ast.Call)
        and script.full_name(call.func) == "copy.deepcopy"
        and call.args
        and ast.unparse(call.args[0]) in models
        and call.lineno > min(distributed)
        for target in made.targets
    }
    replicated = all(
        isinstance(each.value, ast.Constant) and each.value.value == "ddp"
        for call in script.calls()
        if last_name(call).startswith("as_distributed")
        for each in call.keywords
        if each.arg == "strategy"
    )
    averaged = {
        call
        for call in averages(script)
        if replicated and ast.unparse(argument(call, 0, "model") or call) in models
    }
    own_averages = {
        f"{ast.unparse(target)}.module"
        for made in script.of_type(ast.Assign)
        if averaged & {*ast.walk(made.value)}
        for target in made.targets
    }
    for call in script.calls("torch.save", "safetensors.torch.save_file"):
        for saved in _values_of(script, argument(call, 0, "obj") or argument(call, 0, "tensors")):
            if not isinstance(saved, ast.Call) or not isinstance(saved.func, ast.Attribute):
                continue
            name = ast.unparse(saved.func.value)
            if saved.func.attr == "state_dict" and name in models | own_averages:
                yield finding(
                    saved,
                    "the names in the file begin with `module.`, so the plain model cannot load it",
                    f"{name}.module.state_dict(), or, under every strategy, "
                    f"{name}.full_state_dict(), called on every rank"
                    if name in models
                    else "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "
                    '"module.") before saving: docs/guides/averages.md#sharded-parameters',
                )


def _values_of(script: Script, node: ast.expr | None) -> list[ast.AST]:
    """Returns the expression itself; if it is a variable, the values that the script assigns to
    it."""
    if not isinstance(node, ast.Name):
        return [node] if node is not None else []
    return script.once(assigned_values).get((script.scope(node), node.id), [])


def _seeds(script: Script) -> Iterator[Finding]:
    seeders = (
        "torch.manual_seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "random.seed",
        "numpy.random.seed",
    )
    for call in script.calls("torch.seed", *seeders):
        words = set[str]().union(*(words_in(argument) for argument in call.args))
        name = script.full_name(call.func)
        if not call.args and name != "torch.seed" and call.keywords:
            continue
        if not call.args or words & {"time", "rank", "urandom", "getpid", "now", "randint"}:
            yield finding(
                call,
                "the seed differs between ranks, so a replacement worker draws other random "
                "numbers than the worker that it replaces",
                "use the same constant on every rank; ElasticDataLoader(seed=...) seeds the "
                "random numbers of each batch",
            )


STATE_RULES: Final[tuple[Callable[[Script], Iterator[Finding]], ...]] = (
    _values,
    _collections,
    _learning_rates,
    _copies,
    _averages,
    _made_in_loops,
    _epoch_schedules,
    _loads_between_loops,
    _prefixed_names,
    _seeds,
)
