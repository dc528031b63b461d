"""docs/torch-calls.md: the table of calls.py, which the tests run.
`python -m tests.unit.torch_calls.page PATH` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.torch_calls.calls import CALLS, KINDS, RIGHT

_TEXT = """# torch's own calls on a distributed model

Scripts look into a model with torch's own functions: they clip `p.grad`, save `state_dict()`, count
`p.numel()`. Under strategies that cut a model over ranks, what these look at is not on one rank, or
not between passes. No such call is wrong without a word: it gives what one process would get, or it
raises a `PreconditionError` (or `ConfigurationError`) that names what to call instead. Before the
first step every rank holds all of the model, and every call works as in plain torch.

This table is what the tests check (`tests/unit/torch_calls`): each call on a distributed model,
with and without micro-batches, beside the same call in one process, and the training that follows.
`right`: it gives, and does, the same. Else it raises, and names what stands there. `model` is what
`as_distributed` returned, `module` the user's own. Under `local_sgd` one process is a rank by
itself, within a round.

{table}

`async_sgd` is not in the tests of the table: a worker holds whole values, gradients of its own that
nobody sums, and no optimizer state. So the calls are right for that worker, and values that a
script sets are overwritten by the servers' with the next step.

## Which rank calls

`state_dict()`, `numel()` and the like are local. What gathers is a collective: every rank calls
`model.full_state_dict()`, `model.gather_full_parameters()`, `model.clone()`,
`copy.deepcopy(model)`, `AveragedModel(model)`, `optimizer.state_dict()`.

```python
state = model.full_state_dict()  # on every rank
if shoal.is_main_process():
    torch.save(state, "model.pt")
```

## Every step clears its gradients

A loop that calls `optimizer.zero_grad()` in every second step, or never, adds the gradients of
several steps up in plain torch, and under `ddp`. Where gradients are cut they are gone with the
step: `optimizer.step()` raises if a backward pass came while those of the step before were still
there. Large batches in parts are `micro_batch_size=` ([guide](guides/accumulation.md)).

## Which values the optimizer has

`optimizer.param_groups` has the optimizer's settings, read and set there as ever, and the model's
own parameters, though the optimizer updates pieces of them where these are cut. So what is computed
there over `p` is as over `model.parameters()`: right, or an error that names what to call.
`model.gather_full_parameters()` gives whole values on every rank, and `optimizer.state_dict()` the
whole state; `optimizer.state[p]` raises where this rank has that of its pieces. Step hooks of one
optimizer, and those of all (`torch.optim.optimizer.register_optimizer_step_post_hook`), would be
called with the optimizer of the pieces: `optimizer.step()` raises. [Why
so](explanation/consistency.md#parameters-whose-values-are-elsewhere).

What changes values (`load_state_dict`, `p.mul_`, `nn.init`) has to be done alike on every rank, as
in torch's own data parallelism.

## What the module is made of

- Two parameters that share memory and are not one object (`b.weight.data = a.weight.data.t()`,
  `nn.Parameter(a.weight.data)`) train as in one process under `ddp`. Other strategies would untie
  them, so `as_distributed` raises if one of them is trained: give both modules the same
  `nn.Parameter`. Views of one storage that have no element in common are right everywhere. A buffer
  in a trained parameter's memory is refused under every strategy
  (`tests/unit/worker_strategies/test_shared_memory.py`).
- Parameters may be frozen and unfrozen between steps under `ddp`, `local_sgd` and `async_sgd`, on
  all ranks alike; other strategies refuse it. A parameter that comes later, or in another's place,
  in the module or in `optimizer.param_groups`, is refused: change values in place
  (`test_parameters_that_change.py` there).
- `p.register_hook` and `p.register_post_accumulate_grad_hook` see, and may change, the gradient of
  this rank's samples, before the ranks' are summed. Under `tensor`, `pipeline` and `hybrid` other
  tensors take the parameters' places, and hooks are refused, before `as_distributed` and after it
  (`test_gradient_hooks.py`).
- Buffers that a step changes follow one rule for each dtype, under every strategy with a common
  step (`test_one_rule_for_buffers.py`, `test_buffers.py`). It applies to what `state_dict()` has.
  Floating-point buffers become the ranks' weighted mean. A buffer whose elements all are infinite
  at `as_distributed` is a minimum, and one whose elements all are negative infinity a maximum; it
  becomes that of all ranks. So do `min_val` and `max_val` of torch's quantization observers, and
  `scale` and `zero_point` are computed anew from them. In a pass each rank quantizes by its own
  samples. Per-channel observers get their shape in the first pass: under `tensor`, `pipeline` and
  `hybrid` let it come before `as_distributed`. In an `int64` buffer, changes that are alike in all
  passes count once (a count of steps), and others are summed (a count of samples); changes that
  are, or add up to, the number of each pass's samples are summed too. In passes of one sample the
  two cannot be told apart, and count as steps. A largest or a least value is no count: keep it in
  floating point, beginning at infinity. Where changes are summed that are not the number of samples
  (in the first 100 steps), a warning names the buffer. All else (`bool`, other integers, complex
  numbers, floating-point buffers of which some elements are infinite) must be changed alike on all
  ranks and in all micro-batches, or `BUFFERS_DIFFER` names the buffer in the first step that
  differs. A buffer that was `None` at `as_distributed` must stay so, unless it is
  `persistent=False`; the same holds of buffers that a pass registers. Under `local_sgd` the same
  holds of each round. Change buffers between steps on all ranks alike, in the forward pass, or,
  with a plain batch and `backward()`, until `optimizer.step()`. What a script changes when the step
  is closed (behind `train_step`, clipping, or the inner loop over micro-batches) stays what each
  rank made of it, and has to be alike. Changes of more than 2^40 in a step are refused.
- Parameters that a forward pass writes (momentum encoders, initialization from the first batch,
  clipping of weights) are as in one process under `ddp`, `zero1` and `zero2`, if all ranks and
  micro-batches write the same values; `PARAMETERS_WRITTEN` names them if not. Strategies that
  compute with copies or parts of parameters refuse such writes, also in one process. `local_sgd`
  refuses them for frozen parameters, `async_sgd` for all. Writes by way of `p.data`, which torch
  does not count, are looked for in all of a parameter in the first step that a process takes, and
  in a few of its elements later, on the host (`test_written_parameters.py`).
- What one rank alone writes to parameters or buffers between two steps (`p.mul_`,
  `load_state_dict`, `p.data.mul_`) raises `REPLICAS_DIVERGED` in the next step, before it is
  applied, and names the tensor and the ranks; `local_sgd` averages it. A rank may swap weights for
  an evaluation and put them back (`test_written_between_steps.py`).
- A lost step puts back what its passes changed: buffers, written parameters, extra state, and
  tensors and numbers that modules keep as attributes (under `tensor`, `pipeline` and `hybrid`
  tensors alone).
- `get_extra_state()` may give whatever a checkpoint can hold, or `as_distributed` raises. It goes
  to workers that join, into checkpoints, `full_state_dict()` and files; where ranks differ, the
  first one's counts.
- `state_dict()` may name entries otherwise than `named_parameters()`, or leave parameters out, as
  activation-checkpointing wrappers and hooks do. `full_state_dict()` has the names of
  `state_dict()`; checkpoints also hold what hooks leave out. An entry that a hook computes from
  parameters is refused where no rank has these whole (`test_module_state.py`).
- `shoal.evaluate`, `model.predict` and fits call the modules' own `eval()` and `train()`, then
  restore modules that differed.
- Methods of an optimizer beside torch's own raise where the optimizer has parts of the parameters,
  once they are called on what `as_distributed` returned (`test_optimizer_methods.py`).
- Optimizer state is made of what a checkpoint can hold: tensors, numbers, strings, and lists and
  dictionaries of these (under `tensor`, `pipeline` and `hybrid` no lists or dictionaries). The
  first step raises `STATE_UNSUPPORTED` otherwise, and names the parameter and the entry
  (`test_state_that_cannot_travel.py`).
- Objects of `shoal.register_state` are put back after a lost step to what they were when the script
  got its batch.
- Buffers that `state_dict()` has not (`persistent=False`: tables, masks, random projections) are
  the first rank's on all ranks, when training begins and on workers that join; one whose shape
  differs (a cache) stays as it is. Steps do not sum their changes. After `shoal.resume` they are
  what the first rank's script has made of them, as in plain torch, not what the checkpoint's run
  had. Under `async_sgd` each worker has its own, as of all buffers.
- `BatchNorm` layers need two samples on a rank. If the model has any, the ranks of a short last
  step get at least two each, and the others none, as long as whole steps have two for every rank
  (`global_batch_size`). Whole steps with fewer are warned of (`test_batch_norm_in_short_steps.py`).
- `nn.Embedding` and `nn.EmbeddingBag` with `max_norm` change their weight in the forward pass, each
  rank the rows of its own samples: they are refused. With `scale_grad_by_freq` rows are counted in
  each rank's part of the batch, and a warning says so.
- Parameters may lie in memory in any order (`channels_last`, transposed): gradients and moments lie
  as they do, which torch's fused optimizers rely on (`test_odd_parameters.py`).

## Methods beside forward

Under `zero3`, `fsdp` and `hsdp` a rank has the parameters in passes only, so
`model.module.encode(x)` raises. Register the method on every rank, then call it on the model:
`model.encode(x)` then is a pass like `model(x)`, in training and in evaluation mode, under every
strategy that does not split layers or stages. (FSDP2 has `register_fsdp_forward_method` for this.)

```python
model, optimizer = shoal.as_distributed(net, optimizer, strategy="zero3")
model.register_forward_method("encode")
...
loss = contrast(model.encode(images), model.encode(texts))
```

## torch.compile

`torch.compile(model)`, with what as_distributed returned, computes what the model does, under every
strategy: Shoal's own code and its hooks run as they are, and the user's modules between them are
compiled. `model.compile()` does so in place, and so does compiling the module, or blocks of it,
before `as_distributed`. Under `tensor`, `pipeline` and a `hybrid` of these, layers that are split
are left as they are (`tests/unit/worker_strategies/test_compiled_models.py`).

## A moving average

`AveragedModel(model)` is a copy of the whole model under every strategy. `update_parameters(model)`
needs whole values on every rank, so where parameters are cut, do it with those:

```python
average = torch.optim.swa_utils.AveragedModel(model)
...
with torch.no_grad():
    whole = model.gather_full_parameters()
    for kept, new in zip(average.parameters(), whole.values(), strict=True):
        kept.lerp_(new, 0.001)
```

## Why

A parameter whose values, or whose gradient, are elsewhere changes its class for that time: it still
tells its shape and dtype, and raises where values are asked for. In passes it is a plain parameter,
so `torch.compile`, checkpointing and autocast see nothing of it
([why](explanation/consistency.md#parameters-whose-values-are-elsewhere)).
"""


def page() -> str:
    """The whole of docs/torch-calls.md."""
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
