"""Rules of `shoal check`: lines that are wrong or wasteful in an elastic run. Pure.

Each rule yields findings that describe the effect and the remedy. A finding is certain, except
where the script does not show what a rule would check. Lines with the comment `# shoal: ignore` are
skipped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from shoal.checking.findings import Finding, finding
from shoal.checking.loaders import Loaders
from shoal.checking.script import Loop, Script, argument, is_name, is_no_grad, last_name, words_in
from shoal.checking.sources import Sources
from shoal.checking.state import STATE_RULES
from shoal.checking.steps import accumulating_loops, sums_of_losses

_IGNORED: Final = re.compile(r"#\s*shoal:\s*ignore\b")


def check(source: str, name: str = "<script>") -> list[Finding] | None:
    """Returns the findings of a script, ordered by line; None if the script has no training loop to
    check.

    Raises SyntaxError.
    """
    script = Script(source, name)
    if not (script.training_loops() or any(_trainers(script)) or _uses_elastic_trainer(script)):
        return None
    found = {each for rule in _RULES for each in rule(script)}
    return sorted(each for each in found if not _IGNORED.search(script.lines[each.line - 1]))


# ------------------------------------------------------------------------------------- side effects

_OWN_FILE: Final = frozenset(
    {"pid", "getpid", "tmp", "temp", "tempfile", "mkdtemp", "mkstemp", "bytes", "io", "buffer"}
    | {"devnull", "uuid"}
)
"""Words that suggest that an expression names a file of a single process."""
SAVES: Final = {
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
_TRACKERS: Final = {"wandb": "WandB", "mlflow": "MLflow"}
"""Counterparts in Shoal of libraries that record numbers; TensorBoard's for the others."""
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
                "`if shoal.is_main_process():` around the lines that open and write it, or a path "
                "with shoal.rank() in it; open a log for each write, in mode 'a', because another "
                "rank may become the main process; if the script reads the file later, `with "
                "shoal.main_first() as first:` and `if first:`"
            )
        yield finding(
            call,
            f"{name or last_name(call)}() writes {ast.unparse(path)} on every rank, so ranks "
            "overwrite each other's file",
            remedy,
        )


def _open_files(script: Script) -> set[str]:
    """Returns the names of variables that are open files."""
    return {
        name.id
        for name, value in script.once(_bindings)
        if isinstance(value, ast.Call) and last_name(value) == "open"
    }


def _bindings(script: Script) -> list[tuple[ast.Name, ast.expr]]:
    """Returns the variables that an assignment or a `with` statement binds, with their values."""
    found: list[tuple[ast.AST | None, ast.expr]] = [
        (item.optional_vars, item.context_expr)
        for node in script.of_type(ast.With)
        for item in node.items
    ]
    found += [
        (target, node.value) for node in script.of_type(ast.Assign) for target in node.targets
    ]
    return [(name, value) for name, value in found if isinstance(name, ast.Name)]


def _kept_open(script: Script) -> Iterator[Finding]:
    """Reports files and writers that only the main process opens above a training loop that uses
    them."""
    sources = script.once(Sources)
    for loop in sources.outer_loops():
        executed = {*ast.walk(loop), *sources.executed_by[loop]}
        called = {script.full_name(each.func) for each in executed if isinstance(each, ast.Call)}
        for call in script.calls():
            name = script.full_name(call.func)
            record = name in _STARTS_RECORD
            if (
                not (record or (last_name(call) == "open" and _written_path(name, call)))
                or not any(
                    isinstance(above, ast.If | ast.IfExp) and script.mentions_rank(above.test)
                    for above in script.above(call)
                )
                or script.scope(call) not in script.unguarded_scopes
                or script.is_in_training_loop(call)
            ):
                continue
            library = name.partition(".")[0]
            if _is_used(script, call, executed) or (
                library in ("wandb", "mlflow")
                and any(each.startswith(f"{library}.") for each in called)
            ):
                yield finding(
                    call,
                    f"only the first main process calls {last_name(call)}(); if it dies, another "
                    f"rank takes its place without the {'writer' if record else 'file'}",
                    _tracker(name)
                    if record
                    else "`if shoal.is_main_process():` and below it `with open(path, 'a') as "
                    "file:`, for each write: docs/guides/side-effects.md",
                )


def _tracker(name: str) -> str:
    """Returns the remedy for a function that starts a record."""
    tracker = _TRACKERS.get(name.partition(".")[0], "TensorBoard")
    return f"shoal.track(shoal.{tracker}(...)) with shoal.report(...)"


def _is_used(script: Script, call: ast.Call, executed: set[ast.AST]) -> bool:
    """Returns whether one of the nodes `executed` uses the result of a call, directly or as part of
    another object, such as the file of a csv.writer."""
    left: list[ast.AST] = [call]
    followed = set[ast.AST]()
    stored = {name for name, _ in script.once(_bindings)}  # set again in the loop
    while left:
        node = left.pop()
        for name, value in script.once(_bindings):
            if name not in followed and any(part is node for part in ast.walk(value)):
                followed.add(name)
                if not any(is_name(each, name.id) for each in executed & stored):
                    left += script.uses(name)
        if node in executed:
            return True
    return False


def _written_path(name: str, call: ast.Call) -> ast.AST | None:
    """Returns the path that a call writes to; None if the call does not write a file."""
    if name in SAVES:
        keyword = {"torch.save": "f", "numpy.savetxt": "fname"}.get(name, "file")
        return argument(call, SAVES[name], keyword)
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
            yield finding(
                call,
                "print() on every rank prints the same line once per worker",
                "shoal.print_once(...)",
            )
        elif kind == "summary":
            yield finding(
                call,
                f"{last_name(call)}() on every rank prints the same line once per worker",
                "`if shoal.is_main_process():` before it",
            )
        elif kind == "bar" and not any(each.arg == "disable" for each in call.keywords):
            yield finding(
                call,
                f"{last_name(call)}() on every rank: the workers' bars overwrite each other",
                f"{last_name(call)}(..., disable=not shoal.is_main_process()); `shoal run` shows "
                "its own bar",
            )
        elif kind == "log":
            yield finding(
                call,
                f"{last_name(call)}() on every rank logs each message once per worker",
                "level=logging.INFO if shoal.is_main_process() else logging.WARNING, and files "
                "within `if shoal.is_main_process():`",
            )
        elif kind == "record":
            yield finding(
                call,
                f"{last_name(call)}() on every rank writes one record per worker, and another for "
                "each replacement",
                f"{_tracker(name)}; a writer that is opened only in the main process is missing "
                "once another rank takes its place",
            )


# --------------------------------------------------------------------------------------------- data


def _data(script: Script) -> Iterator[Finding]:
    loaders = script.once(Loaders)
    for loop, plain in loaders.plain_loops():
        if script.trains(loop):
            for loader in plain:
                yield _plain_loader(loader)
        elif _evaluates(script, loop) and script.runs_on_all_ranks(loop):
            yield finding(
                loop,
                "every rank validates the entire dataset, which is as slow as on one rank",
                "shoal.evaluate(model, loader, fn), where fn(model, batch) returns sums",
            )
    for loop in script.of_type(ast.For, ast.While):
        if (
            not script.trains(loop)
            and script.once(Sources).makes_batches(loop)
            and _evaluates(script, loop)
            and script.runs_on_all_ranks(loop)
        ):
            yield finding(
                loop,
                "every rank validates on all batches that the script makes here, which is as slow "
                "as on one rank",
                "shoal.evaluate(model, loader, fn), where loader is a shoal.ElasticDataLoader(..., "
                "train=False) and fn(model, batch) returns sums: docs/migration/nanogpt.md",
            )
    for source in script.once(Sources).drawn_by_next():
        for loader in loaders.of(source) - loaders.dealt:
            yield _plain_loader(loader)


def _plain_loader(loader: ast.Call) -> Finding:
    sampler = argument(loader, 3, "sampler")
    if sampler is not None:
        return finding(
            loader,
            "the DataLoader of the training loop does not adapt to workers that die or join; "
            "its sampler, if it has one, knows only the initial ranks",
            "shoal.ElasticDataLoader(dataset, global_batch_size=...), and `for epoch in "
            "loader.epochs(n)`",
        )
    return finding(
        loader,
        "the DataLoader of the training loop is not distributed: every rank trains on the same "
        "batches",
        "shoal.ElasticDataLoader(dataset, global_batch_size=...), or "
        "shoal.ElasticDataLoader.from_dataloader(loader), and `for epoch in loader.epochs(n)`",
    )


def _sources(script: Script) -> Iterator[Finding]:
    for origin in script.once(Sources).without_loader():
        if origin.collected:
            yield finding(
                origin.made_by or origin.loop,
                "each rank trains on samples that it collects itself, and Shoal averages the "
                "ranks' gradients",
                "none, if the ranks are to collect different samples; samples that the script "
                "keeps are lost with a worker, and a worker that joins later starts without them",
                certain=False,
            )
        elif origin.made_by is None:
            yield finding(
                origin.loop,
                "cannot tell whether the ranks train on different samples, because `shoal check` "
                "does not see a DataLoader or ElasticDataLoader that feeds the training loop",
                "a shoal.ElasticDataLoader, unless another module already creates the loop's "
                "batches with one: docs/guides/data-sources.md",
                certain=False,
            )
        else:
            yield finding(
                origin.made_by,
                "the script makes its own batches, which Shoal does not distribute to the ranks: "
                "they train on the same samples or on arbitrary ones, and a step that is retried "
                "trains on other samples",
                "a Dataset that returns one sample for an index, and `for batch in loader:`, where "
                "loader is a shoal.ElasticDataLoader(dataset, global_batch_size=...): "
                "docs/guides/accumulation.md#a-script-that-draws-its-own-batches",
            )


_BATCH_NORM: Final = re.compile(r"torch\.nn\.(Lazy)?BatchNorm\dd")
_DRAWS: Final = re.compile(
    r"torch\.nn\.(functional\.)?\w*[dD]ropout\w*"
    r"|torchvision\.transforms\.(v2\.)?(Random\w+|ColorJitter|\w*Augment\w*)"
)
_REPLICATED: Final = frozenset({"ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"})


def _depends_on_workers(script: Script) -> Iterator[Finding]:
    """Notes the first module or transform with which the result depends on the number of workers,
    if no loader divides its batches into micro-batches."""
    loaders = [
        {each.arg: ast.unparse(each.value) for each in call.keywords}
        for call in script.calls()
        if "ElasticDataLoader" in ast.unparse(call.func)
    ]
    training = [names for names in loaders if names.get("train") != "False"]
    strategies = {
        getattr(each.value, "value", None)
        for call in script.calls()
        if last_name(call).startswith("as_distributed")
        for each in call.keywords
        if each.arg == "strategy"
    }
    if (
        not training
        or any({"micro_batch_size", None} & names.keys() for names in training)
        or strategies - _REPLICATED
    ):
        return
    synchronized = any(last_name(call) == "convert_sync_batchnorm" for call in script.calls())
    for call in script.calls():
        name = script.full_name(call.func)
        place = 1 if ".functional." in name else 0
        never = ast.unparse(argument(call, place, "p") or ast.Constant(1)) in ("0", "0.0")
        normalizes = _BATCH_NORM.fullmatch(name) and not synchronized
        if normalizes or (_DRAWS.fullmatch(name) and not never):
            yield replace(
                finding(
                    call,
                    f"{last_name(call)}: the result depends on the number of workers, as under DDP",
                    "none is needed if that is acceptable; otherwise micro_batch_size= in the "
                    "ElasticDataLoader: "
                    "docs/migration/classifier.md#batchnorm-and-dropout",
                ),
                note=True,
            )
            return


def _accumulation(script: Script) -> Iterator[Finding]:
    for _, place in accumulating_loops(script):
        yield finding(
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
        yield finding(
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
        if name in _GROUPS:
            yield finding(
                call,
                f"{last_name(call)}(): torch's own process group breaks when a worker dies",
                "remove it; shoal.process_group() is the group of the current ranks",
            )
        elif name in _WRAPPERS:
            yield finding(
                call,
                f"{last_name(call)}() communicates with ranks that may have died",
                "model, optimizer = shoal.as_distributed(model, optimizer), after the optimizer "
                "is created",
            )
        elif name in _SAMPLERS:
            yield finding(
                call,
                "DistributedSampler distributes samples only to the initial ranks, and "
                "repeats some to pad the last batch",
                "shoal.ElasticDataLoader(dataset, global_batch_size=...)",
            )
        elif name in _COLLECTIVES and not any(each.arg == "group" for each in call.keywords):
            yield finding(
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
            yield finding(
                node,
                f"the environment's {key.value} is outdated once a worker has died or joined",
                _RANK_VARIABLES[key.value],
            )


def _devices(script: Script) -> Iterator[Finding]:
    remedy = "shoal.device(); as_distributed moves the model there"
    for call in script.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
            yield finding(
                call, ".cuda() uses GPU 0 on every rank until as_distributed is called", remedy
            )
        elif script.full_name(call.func) == "torch.cuda.set_device":
            yield finding(call, "set_device() overrides the GPU that Shoal chooses", remedy)
    for node in script.of_type(ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
            yield finding(
                node, f'"{node.value}" is the same GPU for all ranks of a machine', remedy
            )
    yield from _first_gpu(script)


def _first_gpu(script: Script) -> Iterator[Finding]:
    """Reports "cuda" without a number above `as_distributed`, which selects the rank's GPU."""
    distributed = [call for call in script.calls() if last_name(call).startswith("as_distributed")]
    if any(script.calls("torch.cuda.set_device")) or not (distributed or script.training_loops()):
        return
    for node in script.of_type(ast.Constant):
        if node.value == "cuda" and any(
            not distributed
            or any(
                script.scope(call) is script.scope(use) and use.lineno < call.lineno
                for call in distributed
            )
            for use in placements(script, node)
        ):
            yield finding(
                node,
                '"cuda" is GPU 0 on every rank until as_distributed is called, so the model and '
                "data of all ranks of a machine fill its memory",
                "device = shoal.device(), a torch.device; use device.type where a string is needed",
            )


def placements(script: Script, device: ast.expr) -> Iterator[ast.Call]:
    """Yields the calls that place tensors on the device that an expression names, directly or
    through variables: `x.to(device)`, or calls with `device=` or `map_location=`."""
    left = [device]
    followed = set[ast.AST]()
    while left:
        below: ast.AST = left.pop()
        for above in script.above(below):
            if isinstance(above, ast.Assign) and above not in followed:
                followed.add(above)
                left += (
                    use
                    for target in above.targets
                    if isinstance(target, ast.Name)
                    for use in script.uses(target)
                )
            elif isinstance(above, ast.Call) and below is not above.func:
                if isinstance(below, ast.keyword):
                    if below.arg in ("device", "map_location"):
                        yield above
                elif last_name(above) == "to":
                    yield above
                elif script.full_name(above.func) == "torch.device" and len(above.args) == 1:
                    below = above
                    continue
            elif isinstance(above, ast.keyword) or (
                isinstance(above, ast.IfExp) and below is not above.test
            ):
                below = above
                continue
            break


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
            yield finding(
                node,
                f"{library}'s {trainer} restarts all workers when one dies",
                f"from shoal.integrations.{library} import {trainer}, {_ARGUMENTS[trainer]}",
            )
    for call in script.calls():
        name = script.full_name(call.func)
        if re.fullmatch(r"(lightning|pytorch_lightning)(\.pytorch)?\.Trainer", name):
            if not script.imports("shoal.integrations.lightning"):
                yield finding(
                    call,
                    "Lightning's Trainer restarts all workers when one dies",
                    "ShoalStrategy of shoal.integrations.lightning; see docs/guides/trainers.md",
                )
        elif name == "accelerate.Accelerator":
            yield finding(
                call,
                "Accelerator: all workers are restarted when one dies",
                "shoal.as_distributed and shoal.ElasticDataLoader; see "
                "docs/migration/accelerate.md",
            )
        elif name == "deepspeed.initialize":
            yield finding(
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
            yield finding(
                loop,
                "training loop without as_distributed: every rank trains its own model",
                "model, optimizer = shoal.as_distributed(model, optimizer) before the loop",
            )
            return


_RULES: Final[tuple[Callable[[Script], Iterator[Finding]], ...]] = (
    _files,
    _kept_open,
    _output,
    _data,
    _sources,
    _depends_on_workers,
    _accumulation,
    _loss_sums,
    *STATE_RULES,
    _left_over,
    _devices,
    _trainers,
    _not_distributed,
)
