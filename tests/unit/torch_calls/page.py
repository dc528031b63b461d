"""Generates docs/torch-calls.md from the table in calls.py: `python -m tests.unit.torch_calls.page
PATH`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.torch_calls.calls import CALLS, KINDS, RIGHT

_TEXT = """# torch's own calls on a distributed model

Look up a torch call in the table to see whether it works on a distributed model, and if not, which
call replaces it. Scripts clip `p.grad`, save `state_dict()`, and count `p.numel()`, but strategies
that shard a model spread these values over several ranks, or keep them only during passes. No call
is silently wrong: it either returns the same result as in one process, or raises a
`PreconditionError` or `ConfigurationError` that names the replacement. Before the first step, every
rank has the full model, and every call works as in plain torch.

In the table, `right` means that the call has the same result and effect as in one process. Any
other call raises an error that names the given replacement. `model` is the result of
`as_distributed`, and `module` is your own module.

Tests check each entry (`tests/unit/torch_calls`). They make each call on a distributed model, with
and without micro-batches, and compare the call's result and the subsequent training with those of
one process. Under `local_sgd`, they compare each rank with a single process, within a round.

{table}

These tests do not cover `async_sgd`, whose workers have full values and their own gradients but no
optimizer state. Calls are therefore right for the worker that makes them, unless they change
values. Between two steps, a change of values raises `PARAMETERS_WRITTEN`, because the servers'
values would overwrite it.

## Which rank calls

`state_dict()`, `numel()` and similar calls are local. Calls that gather values are collectives, so
every rank must make them: `model.full_state_dict()`, `model.gather_full_parameters()`,
`model.clone()`, `copy.deepcopy(model)`, `AveragedModel(model)`, `optimizer.state_dict()`.

```python
state = model.full_state_dict()  # on every rank
if shoal.is_main_process():
    torch.save(state, "model.pt")
```

The names in `model.state_dict()` begin with `module.`, as with DDP; those in
`model.module.state_dict()` and `model.full_state_dict()` are the plain model's.
`model.load_state_dict` accepts both.

## Every step clears its gradients

Call `optimizer.zero_grad()` in every step. In plain torch and under `ddp`, a loop that calls it
less often sums the gradients of several steps. Strategies that shard gradients free them after the
step, so a later backward pass cannot add to them. If such a pass runs before `zero_grad()`,
`optimizer.step()` raises an error. To divide large batches, use `micro_batch_size=`
([guide](guides/accumulation.md)). Each step of micro-batches starts without gradients, even if the
script has not called `zero_grad()`.

`zero_grad(set_to_none=False)` is refused by strategies that shard gradients, with micro-batches,
and with several models, because gradients of zero are not kept there. In plain torch, they make the
optimizer apply weight decay and momentum to parameters that a step does not use.

## Which values the optimizer has

Read and set the optimizer's settings in `optimizer.param_groups`, as in torch. The groups contain
the model's own parameters, although the optimizer of a sharded model updates only pieces of them. A
computation over these parameters behaves like a computation over `model.parameters()`: it is either
right, or raises an error that names the replacement. `model.gather_full_parameters()` returns full
values on every rank, and `optimizer.state_dict()` the full state.

If a rank has only the state of its pieces, `optimizer.state[p]` raises an error. If there are step
hooks, for one optimizer or for all (`torch.optim.optimizer.register_optimizer_step_post_hook`),
`optimizer.step()` raises an error, because the hooks would receive the optimizer that has only the
pieces ([why](explanation/consistency.md#parameters-whose-values-are-elsewhere)).

Make calls that change values (`load_state_dict`, `p.mul_`, `nn.init`) on every rank in the same
way, as in torch's own data parallelism.

## What the module is made of

- **Shared memory.** Two parameters that share memory but are different objects (`b.weight.data =
  a.weight.data.t()`, `nn.Parameter(a.weight.data)`) train as in one process under `ddp`. Other
  strategies would untie them, so `as_distributed` raises if one of them is trained: give both
  modules the same `nn.Parameter`. Parameters that share a storage but no element work under every
  strategy. A buffer that shares memory with a trained parameter is refused under every strategy
  (`tests/unit/worker_strategies/test_shared_memory.py`).
- **Freezing.** Under `ddp`, `local_sgd` and `async_sgd`, a script may freeze and unfreeze
  parameters between steps, in the same way on all ranks; other strategies refuse this. No strategy
  accepts parameters that are added or replaced later, in the module or in `optimizer.param_groups`:
  change values in place (`test_parameters_that_change.py` in the same folder).
- `p.register_hook` and `p.register_post_accumulate_grad_hook` receive the gradient of this rank's
  samples, before it is summed over ranks, and may change it. `tensor`, `pipeline` and `hybrid`
  replace the parameters with other tensors, so they refuse hooks that are registered before or
  after `as_distributed` (`test_gradient_hooks.py`).
- Under `ddp` and `tensor`, a script may set `p.grad` instead of calling `backward()`, for example
  to the result of `torch.autograd.grad`. Strategies that shard gradients raise an error
  (`test_gradients_set_by_scripts.py`).
- **Buffers.** The buffers of `state_dict()` follow one rule for each dtype, under every strategy in
  which all ranks take each step together (`test_buffer_rules.py`, `test_buffers.py`). Under
  `local_sgd` the rule applies to each round.
- **Floating-point buffers** become the weighted mean over all ranks. If all elements are positive
  infinity when `as_distributed` is called, the buffer becomes the minimum over all ranks instead;
  if all are negative infinity, the maximum.
- **Quantization observers** of torch: `min_val` and `max_val` become the minimum and maximum over
  all ranks, and `scale` and `zero_point` are computed from them. In a pass, each rank computes
  quantization parameters from its own samples. Per-channel observers get their shape in the first
  pass: under `tensor`, `pipeline` and `hybrid`, run that pass before `as_distributed`.
- **`int64` buffers** are treated as counters. If all passes make the same change, it is added once,
  as for a count of steps; otherwise the changes are summed, as for a count of samples. They are
  also summed if, in each pass, the change of an element or of all elements together equals the
  number of samples, or their weight if the loader has a `weight_fn`. If every pass has one sample,
  the two cases look the same, and the buffer is treated as a count of steps. Store a maximum or
  minimum in floating point instead, with infinity as its initial value. In the first 100 steps, a
  warning names a buffer whose summed changes differ from the number of samples. Another warning
  names a buffer whose equal changes are a multiple of this number, such as a count of tokens.
- **All other buffers** (`bool`, other integers, complex numbers, floating-point buffers with some
  infinite elements) must change in the same way on all ranks and in all micro-batches. Otherwise
  `BUFFERS_DIFFER` names the buffer in the first step that differs.
- **New buffers.** A buffer that was `None` when `as_distributed` was called must remain `None`,
  unless it is `persistent=False`. The same holds for buffers that a pass registers.
- **When to change buffers:** in the forward pass; with a plain batch and `backward()`, also until
  `optimizer.step()`; and between steps, in the same way on all ranks. After `train_step`, after
  clipping, and after the inner loop over micro-batches, changes are no longer reduced, and must be
  the same on all ranks. Changes of more than 2^40 in a step are refused.
- **Written parameters.** A forward pass may write parameters (momentum encoders, initialization
  from the first batch, weight clipping) under `ddp`, `zero1` and `zero2`. All ranks and
  micro-batches must write the same values; otherwise `PARAMETERS_WRITTEN` names the parameters. In
  a model of more than 64 MiB, the first such write must not be in a step with micro-batches.
  Strategies that compute with copies or parts of parameters refuse such writes, even in one
  process. `local_sgd` refuses such writes to frozen parameters, and `async_sgd` refuses all of
  them. torch's version counters do not cover writes to `p.data`, so Shoal detects such writes by
  comparing values of parameters in host memory. It compares all elements in a process's first step,
  and a few in later steps (`test_written_parameters.py`).
- **Writes on one rank.** If only one rank writes to parameters or buffers between two steps
  (`p.mul_`, `load_state_dict`, `p.data.mul_`), the next step raises `REPLICAS_DIVERGED` before it
  is applied. The error names the tensor and the ranks. `local_sgd` averages such values. A rank may
  swap weights for an evaluation and restore them (`test_written_between_steps.py`). Under
  `async_sgd`, a write between two steps raises `PARAMETERS_WRITTEN` unless the script undoes it.
  Shoal detects the write if it changes one of a few compared elements in host memory. If only
  torch's count of in-place changes reveals the write, Shoal warns once and then compares all
  elements. Writes within a round of inner steps are part of what the round pushes.
- If a step is aborted, Shoal restores everything that its passes changed: buffers, written
  parameters, extra state, and tensors and numbers in attributes of modules (under `tensor`,
  `pipeline` and `hybrid`, only tensors).
- A joiner does not receive attributes of modules: in the joiner, they have the values that the
  constructor set. The same is true after `shoal.resume`, as in plain torch. If a pass changes an
  attribute and later passes use it, make it a buffer or return it from `get_extra_state()`.
- `get_extra_state()` must return a value that a checkpoint can store; otherwise `as_distributed`
  raises. Joiners, checkpoints, `full_state_dict()` and saved models include the value. If the
  ranks' values differ, rank 0's value is used.
- `state_dict()` may use other names than `named_parameters()`, or omit parameters, as
  activation-checkpointing wrappers and hooks do. `full_state_dict()` has the names of
  `state_dict()`; checkpoints also contain the omitted parameters. If no rank has the full
  parameters, entries that a hook computes from parameters are refused (`test_module_state.py`).
- `shoal.evaluate`, `model.predict` and fits call the modules' own `eval()` and `train()`, and
  afterwards restore the mode of each module.
- If the optimizer that `as_distributed` returns has only parts of the parameters, methods that
  torch's optimizers do not have raise an error (`test_optimizer_methods.py`).
- Optimizer state may contain tensors, numbers, strings, and lists and dictionaries of these (under
  `tensor`, `pipeline` and `hybrid`, no lists or dictionaries). For anything else, the first step
  raises `STATE_UNSUPPORTED` and names the parameter and the entry
  (`test_state_that_cannot_be_sent.py`).
- If a step is aborted, objects passed to `shoal.register_state` return to the state that they had
  before the script received the step's batch.
- **Non-persistent buffers** (`persistent=False`: tables, masks, random projections) get the values
  of rank 0 when training starts and when a worker joins. A buffer whose shape differs from that of
  rank 0 (a cache) is left unchanged. Steps do not combine the ranks' changes to these buffers.
  After `shoal.resume`, they have the values that the script on rank 0 computed, as in plain torch,
  not the values of the run that wrote the checkpoint. Under `async_sgd`, each worker has its own
  values, as for all buffers.
- `BatchNorm` layers need at least two samples on a rank. If the model has such layers, each rank
  receives at least two samples or none in a short last step, provided that `global_batch_size`
  allows two for every rank in full steps. If it does not, Shoal logs a warning
  (`test_batch_norm_in_short_steps.py`).
- `nn.Embedding` and `nn.EmbeddingBag` with `max_norm` are refused, because each rank would change
  the rows of its own samples in the forward pass. `scale_grad_by_freq` counts rows only in each
  rank's part of the batch; Shoal logs a warning.
- Parameters may have any memory layout (`channels_last`, transposed). Gradients and moments have
  the same layout, as torch's fused optimizers require (`test_odd_parameters.py`).

## Methods other than forward

To call a method other than `forward`, register it on every rank, then call it on the model. Under
`zero3`, `fsdp` and `hsdp`, a rank has the parameters only during passes, so
`model.module.encode(x)` raises. Once registered, `model.encode(x)` is a pass like `model(x)`, in
training and in evaluation mode. This works under every strategy without tensor parallelism and
pipeline stages. (FSDP2 has `register_fsdp_forward_method` for the same purpose.)

```python
model, optimizer = shoal.as_distributed(net, optimizer, strategy="zero3")
model.register_forward_method("encode")
...
loss = contrast(model.encode(images), model.encode(texts))
```

## torch.compile

You can call `torch.compile(model)` on the result of `as_distributed` under every strategy; the
compiled model computes the same values. Only your modules are compiled; Shoal's own code and hooks
run uncompiled. `model.compile()` does the same in place. You may also compile the module, or blocks
of it, before `as_distributed`. Under `tensor`, `pipeline`, and a `hybrid` that uses either, the
layers that are split are not compiled (`tests/unit/worker_strategies/test_compiled_models.py`).

You may replace a module's `forward` (`layer.forward = ...`), except under `tensor`, `pipeline` and
`hybrid`. These split a layer according to its class, so `as_distributed` raises an error.

## A moving average

`AveragedModel(model)` is a copy of the full model under every strategy. `update_parameters(model)`
needs full values on every rank. If the strategy shards parameters, update the average with gathered
values:

```python
average = torch.optim.swa_utils.AveragedModel(model)
...
with torch.no_grad():
    whole = model.gather_full_parameters()
    for kept, new in zip(average.parameters(), whole.values(), strict=True):
        kept.lerp_(new, 0.001)
```

## Why

While the values or the gradient of a parameter are sharded, the parameter has a special class,
which has a shape and a dtype but raises an error if its values are read. During passes, it is a
plain parameter, so `torch.compile`, checkpointing and autocast are unaffected
([why](explanation/consistency.md#parameters-whose-values-are-elsewhere)). """


def page() -> str:
    """Returns the text of docs/torch-calls.md."""
    rows = [["", *(kind.says for kind in KINDS.values())], ["---"] * (1 + len(KINDS))]
    for call in CALLS:
        when = (
            ", between `backward()` and `step()`"
            if call.gradients and "step()" not in call.says
            else ""
        )
        named = [call.expected(kind) for kind in KINDS]
        rows.append(
            [call.says + when, *(each if each is RIGHT else _remedy(each) for each in named)]
        )
    return _TEXT.format(table="\n".join(f"| {' | '.join(row)} |" for row in rows))


def _remedy(named: str) -> str:
    return f"raises: `{named.removesuffix('(')}`" if "." in named else f"raises: {named}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
