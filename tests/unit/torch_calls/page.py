"""Generates docs/torch-calls.md from the table in calls.py: `python -m tests.unit.torch_calls.page
PATH`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.torch_calls.calls import CALLS, KINDS, RIGHT

_TEXT = """# torch's own calls on a distributed model

Look up a torch call in the table to see whether it works on a distributed model, and which call
replaces it. Scripts clip `p.grad`, save `state_dict()`, and count `p.numel()`. Strategies that
shard a model hold these values on several ranks, or only during passes. No such call is silently
wrong. It returns the result of one process, or it raises a `PreconditionError` (or
`ConfigurationError`) that names the replacement. Before the first step every rank holds the full
model, and every call works as in plain torch.

The tests check this table (`tests/unit/torch_calls`). They compare each call on a distributed
model, with and without micro-batches, with the same call in one process, and also the training that
follows. `right`: the call has the same result and effect. Otherwise it raises an error that names
the given replacement. `model` is the result of `as_distributed`, and `module` is your own module.
For `local_sgd`, the comparison is with one rank alone, within a round.

{table}

The table's tests do not cover `async_sgd`. Its workers hold full values and their own gradients,
and no optimizer state. The calls are therefore right for that worker, except those that change
values: between two steps they raise `PARAMETERS_WRITTEN`, because the servers' values would
overwrite them.

## Which rank calls

`state_dict()`, `numel()` and similar calls are local. Calls that gather are collectives, and every
rank must make them: `model.full_state_dict()`, `model.gather_full_parameters()`, `model.clone()`,
`copy.deepcopy(model)`, `AveragedModel(model)`, `optimizer.state_dict()`.

```python
state = model.full_state_dict()  # on every rank
if shoal.is_main_process():
    torch.save(state, "model.pt")
```

## Every step clears its gradients

In plain torch and under `ddp`, a loop that calls `optimizer.zero_grad()` only in every second step,
or never, sums the gradients of several steps. Strategies that shard gradients free them after the
step. `optimizer.step()` then raises if a backward pass ran before the old gradients were cleared.
To divide large batches, use `micro_batch_size=` ([guide](guides/accumulation.md)).

## Which values the optimizer has

Read and set the optimizer's settings in `optimizer.param_groups`, as in torch. The groups contain
the model's own parameters, although the optimizer of a sharded model updates pieces of them. A
computation over these parameters behaves as over `model.parameters()`: it is right, or raises an
error that names the replacement. `model.gather_full_parameters()` returns full values on every
rank, and `optimizer.state_dict()` the full state. `optimizer.state[p]` raises if this rank has only
the state of its pieces. Step hooks of one optimizer or of all
(`torch.optim.optimizer.register_optimizer_step_post_hook`) would receive the optimizer of the
pieces, so `optimizer.step()` raises. See
[the reasons](explanation/consistency.md#parameters-whose-values-are-elsewhere).

Calls that change values (`load_state_dict`, `p.mul_`, `nn.init`) must be the same on every rank, as
in torch's own data parallelism.

## What the module is made of

- **Shared memory.** Two parameters that share memory but are different objects
  (`b.weight.data = a.weight.data.t()`, `nn.Parameter(a.weight.data)`) train as in one process under
  `ddp`. Other strategies would untie them, so `as_distributed` raises if one of them is trained:
  give both modules the same `nn.Parameter`. Views of one storage without a common element are right
  under every strategy. A buffer in a trained parameter's memory is refused under every strategy
  (`tests/unit/worker_strategies/test_shared_memory.py`).
- **Freezing.** Under `ddp`, `local_sgd` and `async_sgd`, a script may freeze and unfreeze
  parameters between steps, in the same way on all ranks; other strategies refuse it. A parameter
  that is added or replaced later, in the module or in `optimizer.param_groups`, is refused: change
  values in place (`test_parameters_that_change.py` there).
- `p.register_hook` and `p.register_post_accumulate_grad_hook` receive the gradient of this rank's
  samples before the sum over ranks, and may change it. `tensor`, `pipeline` and `hybrid` replace
  the parameters by other tensors, so they refuse hooks, before `as_distributed` and after it
  (`test_gradient_hooks.py`).
- **Buffers.** The buffers of `state_dict()` follow one rule for each dtype, under every strategy
  with a common step (`test_one_rule_for_buffers.py`, `test_buffers.py`). Under `local_sgd` the rule
  applies to each round.
- **Floating-point buffers** become the ranks' weighted mean. If all elements are infinite at
  `as_distributed`, the buffer is a minimum over all ranks; if all are negative infinity, it is a
  maximum.
- **Quantization observers** of torch: `min_val` and `max_val` become the minimum and maximum over
  all ranks, and `scale` and `zero_point` are computed from them. In a pass, each rank computes
  quantization parameters from its own samples. Per-channel observers get their shape in the first
  pass: under `tensor`, `pipeline` and `hybrid`, run that pass before `as_distributed`.
- **`int64` buffers** are counters. Equal changes in all passes count once (a count of steps);
  different changes are summed (a count of samples). Changes that are, or add up to, the number of
  each pass's samples are summed too. In passes of one sample the two cases look the same, and count
  as steps. Store a maximum or minimum in floating point instead, with infinity as its initial
  value. In the first 100 steps, a warning names a buffer whose summed changes are not the number of
  samples, and one whose equal changes are a multiple of it, as a count of tokens is.
- **All other buffers** (`bool`, other integers, complex numbers, floating-point buffers with some
  infinite elements) must change in the same way on all ranks and in all micro-batches. Otherwise
  `BUFFERS_DIFFER` names the buffer in the first step that differs.
- **New buffers.** A buffer that was `None` at `as_distributed` must remain `None`, unless it is
  `persistent=False`. The same holds for buffers that a pass registers.
- **When to change buffers:** in the forward pass; with a plain batch and `backward()`, also until
  `optimizer.step()`; and between steps, in the same way on all ranks. Changes after the step is
  closed (after `train_step`, clipping, or the inner loop over micro-batches) are not reduced, and
  must be the same on all ranks. Changes of more than 2^40 in a step are refused.
- **Written parameters.** A forward pass may write parameters (momentum encoders, initialization
  from the first batch, weight clipping) under `ddp`, `zero1` and `zero2`. All ranks and
  micro-batches must write the same values; otherwise `PARAMETERS_WRITTEN` names the parameters.
  Strategies that compute with copies or parts of parameters refuse such writes, even in one
  process. `local_sgd` refuses them for frozen parameters, `async_sgd` for all. torch does not count
  writes to `p.data`. Shoal compares all elements of a parameter in a process's first step, and a
  few elements in later steps, on the host (`test_written_parameters.py`).
- **Writes on one rank.** If only one rank writes to parameters or buffers between two steps
  (`p.mul_`, `load_state_dict`, `p.data.mul_`), the next step raises `REPLICAS_DIVERGED` before it
  is applied. The error names the tensor and the ranks. `local_sgd` averages such values. A rank may
  swap weights for an evaluation and restore them (`test_written_between_steps.py`). Under
  `async_sgd` a write between two steps that is not undone raises `PARAMETERS_WRITTEN`, if a few
  elements of the parameter on the host show it. A write that only torch's count of in-place changes
  shows gets one warning; from then on all elements are compared. Within a round of inner steps a
  write is part of the round's movement.
- An aborted step restores everything that its passes changed: buffers, written parameters, extra
  state, and tensors and numbers in attributes of modules (under `tensor`, `pipeline` and `hybrid`
  only tensors).
- A joiner does not receive attributes of modules: it starts with the values that the constructor
  gave them, and `shoal.resume` does too, as in plain torch. If a pass changes an attribute and
  later passes use it, make it a buffer or return it from `get_extra_state()`.
- `get_extra_state()` must return a value that a checkpoint can store; otherwise `as_distributed`
  raises. Joiners, checkpoints, `full_state_dict()` and files receive it. If ranks differ, the first
  rank's value counts.
- `state_dict()` may use other names than `named_parameters()`, or omit parameters, as
  activation-checkpointing wrappers and hooks do. `full_state_dict()` has the names of
  `state_dict()`; checkpoints also contain the omitted parameters. An entry that a hook computes
  from parameters is refused if no rank has the full parameters (`test_module_state.py`).
- `shoal.evaluate`, `model.predict` and fits call the modules' own `eval()` and `train()`, then
  restore modules that differed.
- The optimizer that `as_distributed` returns may have only parts of the parameters. Its own
  methods, apart from torch's, then raise (`test_optimizer_methods.py`).
- Optimizer state may contain tensors, numbers, strings, and lists and dictionaries of these (under
  `tensor`, `pipeline` and `hybrid` no lists or dictionaries). With anything else, the first step
  raises `STATE_UNSUPPORTED`, and names the parameter and the entry
  (`test_state_that_cannot_travel.py`).
- After an aborted step, objects of `shoal.register_state` return to their state at the time when
  the script received its batch.
- **Non-persistent buffers** (`persistent=False`: tables, masks, random projections) get the first
  rank's values on all ranks, at the start of training and on joiners. A buffer of a different shape
  (a cache) does not change. Steps do not reduce their changes. After `shoal.resume` they have the
  values of the first rank's script, as in plain torch, not those of the checkpoint's run. Under
  `async_sgd` each worker has its own, as for all buffers.
- `BatchNorm` layers need two samples on a rank. If the model has any, each rank in a short last
  step receives at least two samples or none, provided that full steps have two for every rank
  (`global_batch_size`). If full steps have fewer, a warning says so
  (`test_batch_norm_in_short_steps.py`).
- `nn.Embedding` and `nn.EmbeddingBag` with `max_norm` are refused, because each rank would change
  the rows of its own samples in the forward pass. `scale_grad_by_freq` counts rows in each rank's
  part of the batch, and a warning says so.
- Parameters may have any memory layout (`channels_last`, transposed). Gradients and moments have
  the same layout, as torch's fused optimizers require (`test_odd_parameters.py`).

## Methods beside forward

Under `zero3`, `fsdp` and `hsdp` a rank has the parameters only during passes, so
`model.module.encode(x)` raises. Register the method on every rank, then call it on the model.
`model.encode(x)` is then a pass like `model(x)`, in training and in evaluation mode. This works
under every strategy that does not split layers or stages. (FSDP2 has `register_fsdp_forward_method`
for this.)

```python
model, optimizer = shoal.as_distributed(net, optimizer, strategy="zero3")
model.register_forward_method("encode")
...
loss = contrast(model.encode(images), model.encode(texts))
```

## torch.compile

`torch.compile(model)` on the result of `as_distributed` computes the same as the model, under every
strategy. It compiles the user's modules; Shoal's own code and hooks run uncompiled.
`model.compile()` does the same in place. You may also compile the module, or blocks of it, before
`as_distributed`. Under `tensor`, `pipeline` and a `hybrid` of these, split layers are not compiled
(`tests/unit/worker_strategies/test_compiled_models.py`).

A module may have a forward pass of its own (`layer.forward = ...`), except under `tensor`,
`pipeline` and `hybrid`, which split layers by what their classes compute: `as_distributed` raises.

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

While the values or the gradient of a parameter are sharded, the parameter has a special class. It
has a shape and a dtype, but raises when its values are read. In passes it is a plain parameter, so
`torch.compile`, checkpointing and autocast are unaffected
([why](explanation/consistency.md#parameters-whose-values-are-elsewhere)).
"""


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
