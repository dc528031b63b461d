"""Rules of `shoal check`: lines that are wrong or wasteful in an elastic run. Pure.

Each rule yields findings that describe the effect and the remedy. A finding is certain, except
where the script does not show what a rule would check. Lines with the comment `# shoal: ignore` are
skipped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shoal.checking.loaders import Loaders
from shoal.checking.script import (
    Loop,
    Script,
    argument,
    assigned,
    has_name,
    is_name,
    is_no_grad,
    last_name,
    words_in,
)
from shoal.checking.sources import Sources
from shoal.checking.steps import (
    OPTIMIZER_WORDS,
    OPTIMIZERS,
    accumulating_loops,
    counters,
    sums_of_losses,
)

_IGNORED: Final = re.compile(r"#\s*shoal:\s*ignore\b")


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """A line to change."""

    line: int
    what: str
    """Effect of the line in an elastic run."""
    remedy: str
    certain: bool = True
    """False if the script does not show whether the line has this effect."""


def check(source: str, name: str = "<script>") -> list[Finding] | None:
    """Returns the findings of a script, ordered by line; None if the script has no training loop to
    check.

    Raises SyntaxError.
    """
    script = Script(source, name)
    if not (script.training_loops() or any(_trainers(script)) or _uses_elastic_trainer(script)):
        return None
    found = {finding for rule in _RULES for finding in rule(script)}
    return sorted(
        finding for finding in found if not _IGNORED.search(script.lines[finding.line - 1])
    )


def _finding(node: ast.AST, what: str, remedy: str, *, certain: bool = True) -> Finding:
    return Finding(line=getattr(node, "lineno", 1), what=what, remedy=remedy, certain=certain)


# ------------------------------------------------------------------------------------- side effects

_OWN_FILE: Final = frozenset(
    {"pid", "getpid", "tmp", "temp", "tempfile", "mkdtemp", "mkstemp", "bytes", "io", "buffer"}
    | {"devnull", "uuid"}
)
"""Words that suggest that an expression names a file of a single process."""
_SAVES: Final = {
    "torch.save": 1,
    "numpy.save": 0,
    "numpy.savez": 0,
    "numpy.savez_compressed": 0,
    "numpy.savetxt": 0,
    "safetensors.torch.save_file": 1,
}
"""Functions that write a file, and the position of its path among their arguments."""
_WRITING_METHODS: Final = frozenset(
    {"save_pretrained", "savefig", "to_csv", "to_parquet", "to_pickle", "tofile"}
)
"""Methods whose first argument is the path of a file that they write."""
_STARTS_RECORD: Final = (
    "wandb.init",
    "mlflow.start_run",
    "torch.utils.tensorboard.SummaryWriter",
    "torch.utils.tensorboard.writer.SummaryWriter",
    "tensorboardX.SummaryWriter",
)
_LOGGERS: Final = ("logging.basicConfig", "logging.FileHandler", "logging.config.dictConfig")
BARS: Final = frozenset(
    f"{module}.{name}"
    for module in ("tqdm", "tqdm.auto", "tqdm.notebook")
    for name in ("tqdm", "trange")
)
"""Functions of tqdm that draw a progress bar."""


def _files(script: Script) -> Iterator[Finding]:
    for call in script.calls():
        name = script.full_name(call.func)
        path = _written_path(name, call)
        if path is None or not script.runs_on_all_ranks(call) or _is_own(script, path):
            continue
        if isinstance(path, ast.Name) and path.id in script.once(_open_files):
            continue  # the call that opens it is reported
        if name == "torch.save":
            remedy = (
                "shoal.save_checkpoint(directory) on every rank, or `if shoal.is_main_process():` "
                "around it; get a model's values from model.full_state_dict(), called on every "
                "rank before"
            )
        else:
            remedy = (
                "`if shoal.is_main_process():` around it, or a path with shoal.rank() in it; if "
                "the script reads the file later, `with shoal.main_first() as first:` and "
                "`if first:`"
            )
        yield _finding(
            call,
            f"{name or last_name(call)}() writes {ast.unparse(path)} on every rank, so ranks "
            "overwrite each other's file",
            remedy,
        )


def _open_files(script: Script) -> set[str]:
    """Returns the names of variables that are open files."""
    opened: list[tuple[ast.AST | None, ast.AST]] = [
        (item.optional_vars, item.context_expr)
        for node in script.of_type(ast.With)
        for item in node.items
    ]
    opened += [(node.targets[0], node.value) for node in script.of_type(ast.Assign)]
    return {
        name.id
        for name, value in opened
        if isinstance(name, ast.Name) and isinstance(value, ast.Call) and last_name(value) == "open"
    }


def _written_path(name: str, call: ast.Call) -> ast.AST | None:
    """Returns the path that a call writes to; None if the call does not write a file."""
    if name in _SAVES:
        keyword = {"torch.save": "f", "numpy.savetxt": "fname"}.get(name, "file")
        return argument(call, _SAVES[name], keyword)
    if name in ("open", "io.open"):
        return argument(call, 0, "file") if _writes(argument(call, 1, "mode")) else None
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in ("write_text", "write_bytes"):
            return call.func.value
        if call.func.attr in _WRITING_METHODS:
            return call.args[0] if call.args else None
        if call.func.attr == "open" and name != "os.open":
            return call.func.value if _writes(argument(call, 0, "mode")) else None
    return None


def _writes(mode: ast.AST | None) -> bool:
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and re.fullmatch(r"[wax][bt+]*", mode.value) is not None
    )


def _is_own(script: Script, path: ast.AST) -> bool:
    """Returns whether a path seems to be used by a single process, because it contains the rank or
    is temporary."""
    if script.mentions_rank(path) or words_in(path) & _OWN_FILE:
        return True
    names = {part.id for part in ast.walk(path) if isinstance(part, ast.Name)}
    return any(
        isinstance(target, ast.Name)
        and target.id in names
        and (script.mentions_rank(node.value) or words_in(node.value) & _OWN_FILE)
        for node in script.of_type(ast.Assign)
        for target in node.targets
    )


def _output(script: Script) -> Iterator[Finding]:
    for call in script.calls():
        name = script.full_name(call.func)
        kind = next(
            (
                kind
                for kind, names in (
                    ("print", ("print",)),
                    ("bar", BARS),
                    ("log", _LOGGERS),
                    ("record", _STARTS_RECORD),
                )
                if name in names
            ),
            "summary" if last_name(call) == "print_trainable_parameters" else None,
        )
        if kind is None or not script.runs_on_all_ranks(call):
            continue
        if any(script.mentions_rank(part) for part in (*call.args, *call.keywords)):
            continue  # the output mentions or depends on the rank
        if kind == "print":
            yield _finding(
                call,
                "print() on every rank prints the same line once per worker",
                "shoal.print_once(...)",
            )
        elif kind == "summary":
            yield _finding(
                call,
                f"{last_name(call)}() on every rank prints the same line once per worker",
                "`if shoal.is_main_process():` before it",
            )
        elif kind == "bar" and not any(each.arg == "disable" for each in call.keywords):
            yield _finding(
                call,
                f"{last_name(call)}() on every rank: the workers' bars overwrite each other",
                f"{last_name(call)}(..., disable=not shoal.is_main_process()); `shoal run` shows "
                "its own bar",
            )
        elif kind == "log":
            yield _finding(
                call,
                f"{last_name(call)}() on every rank logs each message once per worker",
                "level=logging.INFO if shoal.is_main_process() else logging.WARNING, and files "
                "within `if shoal.is_main_process():`",
            )
        elif kind == "record":
            yield _finding(
                call,
                f"{last_name(call)}() on every rank writes one record per worker, and another for "
                "each replacement",
                "`if shoal.is_main_process():` around it, or shoal.track(shoal.TensorBoard(...)) "
                "with shoal.report(...)",
            )


# --------------------------------------------------------------------------------------------- data


def _data(script: Script) -> Iterator[Finding]:
    loaders = script.once(Loaders)
    for loop, plain in loaders.plain_loops():
        if script.trains(loop):
            for loader in plain:
                yield _plain_loader(loader)
        elif _evaluates(script, loop) and script.runs_on_all_ranks(loop):
            yield _finding(
                loop,
                "every rank validates the entire dataset, which is as slow as on one rank",
                "shoal.evaluate(model, loader, fn), where fn(model, batch) returns sums",
            )
    for source in script.once(Sources).drawn_by_next():
        for loader in loaders.of(source) - loaders.dealt:
            yield _plain_loader(loader)


def _plain_loader(loader: ast.Call) -> Finding:
    sampler = argument(loader, 3, "sampler")
    if sampler is not None:
        return _finding(
            loader,
            "the DataLoader of the training loop does not adapt to workers that die or join; "
            "its sampler, if it has one, knows only the initial ranks",
            "shoal.ElasticDataLoader(dataset, global_batch_size=...), and `for epoch in "
            "loader.epochs(n)`",
        )
    return _finding(
        loader,
        "the DataLoader of the training loop is not distributed: every rank trains on the same "
        "batches",
        "shoal.ElasticDataLoader(dataset, global_batch_size=...), or "
        "shoal.ElasticDataLoader.from_dataloader(loader), and `for epoch in loader.epochs(n)`",
    )


def _sources(script: Script) -> Iterator[Finding]:
    for origin in script.once(Sources).without_loader():
        if origin.collected:
            yield _finding(
                origin.made_by or origin.loop,
                "each rank trains on samples that it collects itself, and Shoal averages the "
                "ranks' gradients",
                "none, if the ranks are to collect different samples; samples that the script "
                "keeps are lost with a worker, and a worker that joins later starts without them",
                certain=False,
            )
        elif origin.made_by is None:
            yield _finding(
                origin.loop,
                "cannot tell whether the ranks train on different samples, because `shoal check` "
                "does not see a DataLoader or ElasticDataLoader that feeds the training loop",
                "a shoal.ElasticDataLoader, unless another module already creates the loop's "
                "batches with one: docs/guides/data-sources.md",
                certain=False,
            )
        else:
            yield _finding(
                origin.made_by,
                "the script makes its own batches, which Shoal does not distribute to the ranks: "
                "they train on the same samples or on arbitrary ones, and a step that is retried "
                "trains on other samples",
                "a Dataset that returns one sample for an index, and `for batch in loader:`, where "
                "loader is a shoal.ElasticDataLoader(dataset, global_batch_size=...): "
                "docs/guides/accumulation.md#a-script-that-draws-its-own-batches",
            )


def _accumulation(script: Script) -> Iterator[Finding]:
    for _, place in accumulating_loops(script):
        yield _finding(
            place,
            "gradients accumulate over several batches, but an ElasticDataLoader refuses the next "
            "batch until optimizer.step() was called",
            "shoal.ElasticDataLoader(dataset, global_batch_size=..., micro_batch_size=...), and "
            "`for step in loader.steps():`, in it `for batch in step:` with backward(), and after "
            "that loop optimizer.step(), without the condition; do not divide the loss: "
            "docs/guides/accumulation.md",
        )


def _loss_sums(script: Script) -> Iterator[Finding]:
    for adding, name in sums_of_losses(script):
        yield _finding(
            adding,
            f"{name} counts an aborted step twice, because the step is retried; and a loss that "
            "train_step did not return covers only this rank's samples",
            "shoal.report(loss=loss) on every rank, whose mean `shoal run` shows; for your own "
            "sum, see docs/guides/side-effects.md#average-the-loss-over-an-epoch",
        )


def _evaluates(script: Script, loop: Loop) -> bool:
    """Returns whether a loop runs without gradients, or after a module's `eval()` has been
    called."""
    scope = script.scope(loop)
    if any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "eval"
        and call.lineno < loop.lineno
        and script.scope(call) is scope
        for call in script.calls()
    ):
        return True
    if scope is not None and any(is_no_grad(mark) for mark in scope.decorator_list):
        return True
    inside = [part for part in ast.walk(loop) if isinstance(part, ast.With)]
    around = [above for above in script.above(loop) if isinstance(above, ast.With)]
    return any(is_no_grad(item.context_expr) for part in inside + around for item in part.items)


# -------------------------------------------------------------------------------------------- state

SCHEDULES: Final = re.compile(r"torch\.optim\.lr_scheduler\.\w+|transformers\.get_\w*schedule\w*")
_STEP_NAMES: Final = frozenset({"step", "steps", "iteration", "iterations", "iter", "batches"})


_BEST: Final = (
    "; to keep the best checkpoint, shoal.save_checkpoint(directory, best=..., mode=...) needs no "
    "variable"
)


def _values(script: Script) -> Iterator[Finding]:
    for loop in script.training_loops():
        found = [*_carried_values(script, loop)]
        # one call for all values: a second one would replace `run`
        all_values = {name: ast.unparse(value) for _, name, value in found if not _is_count(name)}
        call = ", ".join(f"{name}={value}" for name, value in all_values.items())
        for made, name, value in found:
            yield _finding(
                made,
                f"the training loop depends on {name}, but a worker that joins later starts with "
                f"{name} = {ast.unparse(value)}",
                "loader.global_step, which counts the run's steps, instead of the script's own "
                "counter"
                if _is_count(name)
                else f"run = shoal.register_state({call}), and run.{name} in the loop"
                + (_BEST if "best" in name.lower().split("_") else ""),
            )


def _carried_values(script: Script, loop: Loop) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yields each variable that starts with a plain value and that the training loop updates and
    compares: the assignment before the loop, the name and the value."""
    scope = script.scope(loop)
    block = script.tree.body if scope is None else scope.body
    for made in (node for part in block for node in ast.walk(part)):
        if (
            isinstance(made, ast.Assign | ast.AnnAssign)
            and made.lineno < loop.lineno
            and script.scope(made) is scope
        ):
            for name, value in assigned(made):
                if _is_plain(value) and _decides(script, loop, name):
                    yield made, name, value


def _is_count(name: str) -> bool:
    """Returns whether a variable seems to count steps, judged by its name."""
    return bool(set(name.lower().split("_")) & _STEP_NAMES)


def _learning_rates(script: Script) -> Iterator[Finding]:
    reported = {
        name for loop in script.training_loops() for _, name, _ in _carried_values(script, loop)
    }
    for node in script.of_type(ast.Assign, ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            if _is_learning_rate(script, target):
                for use in counters(script, node.value):
                    name = ast.unparse(use)
                    if name not in reported:
                        yield _finding(
                            use,
                            f"the learning rate depends on `{name}`, the script's own counter of "
                            "steps, which starts afresh in a worker that joins later and after "
                            "a resume, and includes aborted steps",
                            "compute it from loader.global_step, the number of committed steps",
                        )


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


def _copies(script: Script) -> Iterator[Finding]:
    registered = {
        part.id
        for call in script.calls()
        if last_name(call) in ("register_state", "as_distributed")
        for each in (*call.args, *call.keywords)
        for part in ast.walk(each)
        if isinstance(part, ast.Name)
    }
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
            yield _finding(
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
            yield _finding(
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
            yield _finding(
                call,
                f"{kind} created within the training loop: its state is reset in every "
                "iteration, and in workers that join later",
                f"create the {kind} once, before the loop",
            )


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
            yield _finding(
                call,
                "the seed differs between ranks, so a replacement worker draws other random "
                "numbers than the worker that it replaces",
                "use the same constant on every rank; ElasticDataLoader(seed=...) seeds the "
                "random numbers of each batch",
            )


# ----------------------------------------------------------- code for other libraries or one device

_WRAPPERS: Final = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard",
)
_GROUPS: Final = (
    "torch.distributed.init_process_group",
    "torch.distributed.destroy_process_group",
)
_SAMPLERS: Final = (
    "torch.utils.data.DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler",
)
_COLLECTIVES: Final = {
    "torch.distributed.all_reduce": "shoal.all_reduce(value)",
    "torch.distributed.reduce": "shoal.all_reduce(value)",
    "torch.distributed.all_gather": "shoal.gather(value)",
    "torch.distributed.all_gather_object": "shoal.gather(value)",
    "torch.distributed.broadcast": "shoal.broadcast(value)",
    "torch.distributed.barrier": "shoal.barrier()",
    "torch.distributed.get_rank": "shoal.rank()",
    "torch.distributed.get_world_size": "shoal.world_size()",
}
_RANK_VARIABLES: Final = {
    "RANK": "shoal.is_main_process(), or shoal.rank()",
    "LOCAL_RANK": "shoal.device()",
    "WORLD_SIZE": "shoal.world_size()",
}


def _left_over(script: Script) -> Iterator[Finding]:
    for call in script.calls():
        name = script.full_name(call.func)
        if name in (
            "torch.distributed.init_process_group",
            "torch.distributed.destroy_process_group",
        ):
            yield _finding(
                call,
                f"{last_name(call)}(): torch's own process group breaks when a worker dies",
                "remove it; shoal.process_group() is the group of the current ranks",
            )
        elif name in _WRAPPERS:
            yield _finding(
                call,
                f"{last_name(call)}() communicates with ranks that may have died",
                "model, optimizer = shoal.as_distributed(model, optimizer), after the optimizer "
                "is created",
            )
        elif name in _SAMPLERS:
            yield _finding(
                call,
                "DistributedSampler distributes samples only to the initial ranks, and "
                "repeats some to pad the last batch",
                "shoal.ElasticDataLoader(dataset, global_batch_size=...)",
            )
        elif name in _COLLECTIVES and not any(each.arg == "group" for each in call.keywords):
            yield _finding(
                call,
                f"torch.distributed.{last_name(call)}() without group=, but an elastic job has no "
                "default group",
                _COLLECTIVES[name],
            )
    yield from _rank_variables(script)


def _rank_variables(script: Script) -> Iterator[Finding]:
    for node in script.of_type(ast.Call, ast.Subscript):
        if isinstance(node, ast.Subscript):
            of, key = script.full_name(node.value), node.slice
            read = of == "os.environ" and isinstance(node.ctx, ast.Load)
        else:
            read = script.full_name(node.func) in ("os.environ.get", "os.getenv")
            key = node.args[0] if node.args else node
        if read and isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES:
            yield _finding(
                node,
                f"the environment's {key.value} is outdated once a worker has died or joined",
                _RANK_VARIABLES[key.value],
            )


def _devices(script: Script) -> Iterator[Finding]:
    remedy = "shoal.device(); as_distributed moves the model there"
    for call in script.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
            yield _finding(
                call, ".cuda() uses GPU 0 on every rank until as_distributed is called", remedy
            )
        elif script.full_name(call.func) == "torch.cuda.set_device":
            yield _finding(call, "set_device() overrides the GPU that Shoal chooses", remedy)
    for node in script.of_type(ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
            yield _finding(
                node, f'"{node.value}" is the same GPU for all ranks of a machine', remedy
            )


_TRAINERS: Final = re.compile(r"(transformers|trl)\.(?:\w+\.)*((?:Seq2Seq|SFT|DPO)?Trainer)")
_ARGUMENTS: Final = {
    "Trainer": "TrainingArguments",
    "Seq2SeqTrainer": "Seq2SeqTrainingArguments",
    "SFTTrainer": "SFTConfig",
    "DPOTrainer": "DPOConfig",
}
"""Trainers of transformers and TRL with a counterpart in `shoal.integrations`, and the class of
their arguments there."""


def _trainers(script: Script) -> Iterator[Finding]:
    bases = (base for each in script.of_type(ast.ClassDef) for base in each.bases)
    for node in (*(call.func for call in script.calls()), *bases):
        if found := _TRAINERS.fullmatch(script.full_name(node)):
            library, trainer = found.groups()
            yield _finding(
                node,
                f"{library}'s {trainer} restarts all workers when one dies",
                f"from shoal.integrations.{library} import {trainer}, {_ARGUMENTS[trainer]}",
            )
    for call in script.calls():
        name = script.full_name(call.func)
        if re.fullmatch(r"(lightning|pytorch_lightning)(\.pytorch)?\.Trainer", name):
            if not script.imports("shoal.integrations.lightning"):
                yield _finding(
                    call,
                    "Lightning's Trainer restarts all workers when one dies",
                    "ShoalStrategy of shoal.integrations.lightning; see docs/guides/trainers.md",
                )
        elif name == "accelerate.Accelerator":
            yield _finding(
                call,
                "Accelerator: all workers are restarted when one dies",
                "shoal.as_distributed and shoal.ElasticDataLoader; see "
                "docs/migration/accelerate.md",
            )
        elif name == "deepspeed.initialize":
            yield _finding(
                call,
                "deepspeed.initialize: all workers are restarted when one dies",
                'shoal.as_distributed(..., strategy="zero2"): docs/migration/deepspeed.md',
            )


def _uses_elastic_trainer(script: Script) -> bool:
    """Returns whether a script uses a Trainer or a strategy of `shoal.integrations`, whose training
    loop is not in the script."""
    return any(
        script.full_name(node).startswith("shoal.integrations.")
        for node in script.of_type(ast.Name, ast.Attribute)
    )


def _not_distributed(script: Script) -> Iterator[Finding]:
    names = {last_name(call) for call in script.calls()}
    if any(name.startswith("as_distributed") for name in names) or any(_trainers(script)):
        return
    for loop, executed in script.once(Sources).executed_by.items():
        if "step" in {last_name(part) for part in executed if isinstance(part, ast.Call)}:
            yield _finding(
                loop,
                "training loop without as_distributed: every rank trains its own model",
                "model, optimizer = shoal.as_distributed(model, optimizer) before the loop",
            )
            return


_RULES: Final[tuple[Callable[[Script], Iterator[Finding]], ...]] = (
    _files,
    _output,
    _data,
    _sources,
    _accumulation,
    _loss_sums,
    _values,
    _learning_rates,
    _copies,
    _averages,
    _made_in_loops,
    _seeds,
    _left_over,
    _devices,
    _trainers,
    _not_distributed,
)
