"""Uses hooks on the user's modules to gather and free units, and to reduce their gradients, around
forward and backward passes. A unit is a group of parameters (`unit.py`).

- Forward: before a unit's module runs, its parameters are gathered, and gathering of the next
  `prefetch` units starts. After it has run, its parameters are freed. The outermost unit remains
  gathered, because its own layers run first and last (embedding and head).
- Backward: before the first gradient reaches a unit's module, the unit is gathered again. When the
  backward pass has left the module, the unit's gradients are reduced and the unit is freed. If
  parameters are not sharded, a unit is reduced as soon as all of its parameters have their
  gradients.
- Reductions are issued in a fixed order, last unit first, regardless of the order in which
  gradients arrive, and each unit is reduced in every backward pass. Ranks therefore issue the same
  collectives even if some of them do not use a parameter. Gathers are issued in the order of the
  passes, which must run through the blocks in the same order on all ranks; `issued` detects
  differences between ranks.

This module knows nothing about steps: `engine.py` determines the weight of the next gradients, and
when they are reduced. Everything runs on the training thread or, in a backward pass, on autograd's
thread while the training thread waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import MembershipChanged, PreconditionError
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal_worker.elastic.group.group import Group
from shoal_worker.engine.state.hidden_parameters import Whereabouts, run_last
from shoal_worker.engine.step.passes import half_a_pass, tensors_in, when_gradients_come
from shoal_worker.sharding.collectives import Collectives, IssuedCollectives
from shoal_worker.sharding.unit import Reducing, Stage, Unit
from shoal_worker.torch_internals import after_backward, in_backward, uncompiled

# -------------------------------------------------------------------------------------------- hooks
#
# Hooks on the user's modules and parameters, which report the progress of passes.


class GradientHook:
    """Hook that calls a method once autograd has accumulated a parameter's gradient.

    The hook must not refer to the parameter: Python's garbage collector does not see such a cycle,
    and the model would never be freed.
    """

    def __init__(self, ready: Callable[[int, int], None], number: int, index: int) -> None:
        """`ready`: bound method to call with `number` and `index`. Only a weak reference to the
        method's object is kept."""
        self._ready, self._number, self._index = weakref.WeakMethod(ready), number, index

    def __call__(self, _: torch.Tensor) -> None:
        ready = self._ready()
        if ready is not None:
            ready(self._number, self._index)


class _ModuleHook:
    """Hook on a module. If the module is copied (`clone`), the copy's hook does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> Any:
        raise PreconditionError(
            "the module is sharded over the ranks and cannot be pickled (as torch.save(module) "
            "does); save model.full_state_dict() or model.clone(), on every rank"
        )


def _do_nothing(*_args: Any, **_kwargs: Any) -> None: ...


class BeforeForward(_ModuleHook):
    """Hook that calls a function with a module's inputs before the module runs. Must be registered
    with `with_kwargs=True`."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._call(args[0] if len(args) == 1 and not kwargs else (args, kwargs))


class AfterForward(_ModuleHook):
    """Hook that calls a function with a module's output after the module has run."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call(output)


# -------------------------------------------------------------------------- gather, free and reduce

_IN_FLIGHT: Final = 2
"""Maximum number of reductions in progress at the same time. Each needs memory for a full gradient
of its unit."""


class Block:
    """A module and the units of its parameters, which are gathered together."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self.units = units
        # torch's own layers do not modify tensors in their outputs.
        self._parts = [
            part
            for part in module.modules()
            if not type(part).__module__.startswith("torch.nn.modules.")
        ]
        self._before: list[tuple[Any, dict[int, tuple[torch.Tensor, int]]]] = []
        """Inputs of each forward pass in progress, and the tensors that were visible in them and in
        attributes when the pass began, each with torch's version counter."""
        self.open = 0
        """Number of forward passes through the module for which the backward pass has not
        finished."""
        self.passes_gradients = False
        """True if a backward pass may run through the module: it has trained parameters, or inputs
        that require a gradient."""

    def begins(self, inputs: Any) -> None:
        """Records the beginning of a forward pass that computes gradients."""
        self._before.append(
            (inputs, {id(tensor): (tensor, tensor._version) for tensor in self._visible(inputs)})
        )

    def left_behind(self) -> list[torch.Tensor]:
        """Records the end of the innermost forward pass. Returns the tensors that the pass has
        stored in its inputs (for example, by appending to a list) or in attributes of modules (such
        as an auxiliary loss)."""
        if not self._before:
            return []
        inputs, before = self._before.pop()
        now = self._visible(inputs)
        return [
            tensor
            for tensor in now
            if id(tensor) not in before or before[id(tensor)][1] != tensor._version
        ]

    def _visible(self, inputs: Any) -> list[torch.Tensor]:
        kept = [
            value
            for part in self._parts
            for value in part.__dict__.values()
            if type(value) is torch.Tensor
        ]
        return [tensor for tensor in (*tensors_in(inputs), *kept) if not tensor.is_inference()]


class ShardedExecution:
    """Gathers, frees and reduces the units of one module during its passes."""

    def __init__(
        self,
        units: Sequence[tuple[nn.Module, Sequence[Unit]]],
        collectives: Collectives,
        stage: Stage,
        whereabouts: Whereabouts | None = None,
        *,
        prefetch: int = 1,
    ) -> None:
        """`units`: the modules that are gathered together, outermost first, each with the units of
        its parameters (separate for each dtype, and for trained and frozen parameters).
        `whereabouts`: state shared by the model's hidden parameters; None if they do not belong to
        a model. `prefetch`: number of blocks gathered ahead."""
        self._collectives = collectives
        self._stage = stage
        self._whereabouts = whereabouts or Whereabouts()
        self._prefetch = prefetch
        self.units = [unit for _, own in units for unit in own]
        self._reduced = [unit for unit in reversed(self.units) if unit.trained]
        """Units in the order of reduction."""
        self.factor: float | None = None
        """Weight of the next gradients; None: no gradients are expected."""
        self.came = False
        """True if a gradient has arrived since the last `forget`, even one with weight zero."""
        self.before_backward: Callable[[], None] = _do_nothing
        """Function to call when a backward pass begins, before any gradient is used."""
        self.reduces_in_backward = True
        """True if gradients are reduced as they become ready; False if `reduce_rest` reduces
        them."""
        self.issued = IssuedCollectives()
        """Trace of the step's collectives, if units are gathered in passes."""
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        modules = [(module, Block(module, list(own))) for module, own in units]
        self._blocks = [block for _, block in modules]
        self._root = self._blocks[0]
        self._order: list[Block] = []
        """Blocks in the order of the last forward pass, used for prefetching."""
        self._visited: list[Block] = []
        self._root_forwards = 0
        """Number of forward passes of the outermost module in progress. There are several if the
        module calls itself, as in a LightningModule's `training_step`."""
        self.pinned = False
        """True if units stay gathered until `free_all`."""
        self._in_backward = False
        self._ready: dict[Unit, int] = {}
        """Number of each unit's parameters that have received a gradient in this backward pass."""
        self._left: set[Unit] = set()
        """Units whose modules have completed this backward pass."""
        self._next = 0
        """Index in `_reduced` of the next unit to reduce in this backward pass."""
        self._on_their_way: deque[Reducing] = deque()
        self._pass: list[tuple[str, Unit]] = []
        """Collectives issued so far in the current forward and backward pass."""
        self._whole_pass: list[tuple[str, Unit]] = []
        """Collectives of the last complete forward and backward pass."""
        self._all_know = False
        """True if all ranks of this group know which collectives a pass issues."""
        self._asked = False
        """True if the ranks have already exchanged their lists of collectives in this step."""
        self._number = 0
        """Number of the current or last step."""
        self._issues: Callable[[str], None] = _do_nothing
        self._hooks: list[RemovableHandle] = []
        self._on_gradients: list[tuple[torch.Tensor, RemovableHandle]] = []
        """Trained parameters, each with the hook that removes and processes its gradient."""
        self._around_root: tuple[BeforeForward, AfterForward] | None = None
        """Hooks around the outermost module's forward pass."""
        for number, unit in enumerate(self._reduced):
            for index, leaf in enumerate(unit.leaves):
                hook = GradientHook(self.gradient_ready, number, index)
                handle = leaf.register_post_accumulate_grad_hook(hook)
                self._on_gradients.append((leaf, handle))
        if stage is Stage.PARAMETERS:
            for module, block in modules:
                before = BeforeForward(functools.partial(self.before_forward, block))
                after = AfterForward(functools.partial(self.after_forward, block))
                self._hooks.append(
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                )
                self._hooks.append(module.register_forward_hook(after, always_call=True))
                self._around_root = self._around_root or (before, after)
        elif any(unit.apart for unit in self.units):
            before, after = BeforeForward(self.show_copies), AfterForward(self.hide_copies)
            self._hooks.append(
                units[0][0].register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            )
            self._hooks.append(units[0][0].register_forward_hook(after, always_call=True))
            self._around_root = before, after

    def release(self) -> None:
        """Removes the hooks from modules and parameters, so that another `ShardedExecution` can use
        them."""
        for hook in (*self._hooks, *(handle for _, handle in self._on_gradients)):
            hook.remove()

    # ----------------------------------------------------------------------------- for the strategy

    def as_forward(self, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `method`, a method of the outermost module, with the same
        hooks as the module's `forward`, so that the module's own parameters are available during
        the call."""
        if self._around_root is None:
            return method
        before, after = self._around_root

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args, kwargs)
            output = None
            try:
                output = method(*args, **kwargs)
            finally:
                after(module, args, output)
            return output

        return call

    def gather_all(self) -> None:
        """Gathers all parameters concurrently."""
        self._start(self.units)
        for unit in self.units:
            unit.finish_gathering()

    def free_all(self) -> None:
        """Frees all gathered parameters, except parameters that remain unsharded between passes."""
        self.pinned = False
        for unit in self.units:
            unit.free()

    def applied(self) -> None:
        """Marks unsharded parameters as outdated and fetches their new values. Must be called after
        the optimizer has updated the shards."""
        for unit in self.units:
            unit.changed()
        if self._stage is not Stage.PARAMETERS:
            self.gather_all()
        self._visited = []

    @property
    def passed(self) -> list[tuple[str, int]]:
        """Kind and unit index of each collective in one forward and backward pass, in order. Used
        by `take_part` on this rank or on a joiner."""
        return [(kind, self._numbers[unit]) for kind, unit in self._whole_pass]

    @passed.setter
    def passed(self, collectives: Sequence[tuple[str, int]]) -> None:
        self._whole_pass = [(kind, self.units[number]) for kind, number in collectives]

    def learn_passes(self, group: Group) -> None:
        """Exchanges with other ranks which collectives a pass issues, because a rank without a
        micro-batch must issue them too. Must be called on all ranks, before a step's first
        collective. The exchange takes place once per generation. If no rank knows the collectives
        yet, as in the run's first step, the parameters stay unsharded during that step.

        Raises:
            MembershipChanged: the group has ended.
        """
        if self._all_know or self._asked or group.world_size == 1:
            return
        self._asked = True
        received = [json.loads(each) for each in group.exchange(json.dumps(self.passed).encode())]
        known = next((each for each in received if each), None)
        if known is None:
            self.keep_unsharded()
        else:
            self.passed = self.passed or [(kind, number) for kind, number in known]
            self._all_know = True

    def keep_unsharded(self) -> None:
        """Gathers all units and keeps them gathered until the update. During this time, passes do
        not issue gathers, but record them as if they did. A rank without samples can therefore take
        part although it does not know which collectives a pass issues."""
        self.gather_all()
        for unit in self.units:
            unit.resident = True
            unit.free()

    def take_part(self) -> None:
        """Participates in a pass of other ranks although this rank has no samples for it: issues
        the same collectives, with zero gradients. If this rank does not know which collectives a
        pass issues, it takes part only in the reductions, because parameters are then unsharded on
        all ranks (`keep_unsharded`)."""
        self.free_all()
        for kind, unit in list(self._whole_pass) or [("reduce", unit) for unit in self._reduced]:
            if kind == "gather":
                self._start([unit])
                unit.finish_gathering()
                unit.free()
            else:
                self._reduce(unit)
        self._pass = []

    def reduce_rest(self) -> None:
        """Reduces all gradients that were not reduced during a backward pass, and waits for all
        sums.

        Raises:
            ConfigurationError: the script has set a gradient itself.
        """
        for unit in self._reduced:
            unit.hidden.refuse_set_gradients()
        if not self.reduces_in_backward or any(unit.has_gradient() for unit in self._reduced):
            self._next = 0
            self._reduce_ready(all_of_them=True)
        while self._on_their_way:
            self._on_their_way.popleft().wait()

    def begin_step(self, number: int, issues: Callable[[str], None] = _do_nothing) -> None:
        """Begins a step: calls `forget` and, if an aborted step is repeated, drops the gradients of
        the first attempt. `number`: number of this model's step. `issues`: function called before
        this rank issues a collective."""
        self.forget()
        if number == self._number:
            self.drop_gradients()
        self._number, self._pass, self._issues = number, [], issues
        self.issued.begin(number)
        self._asked = False

    @property
    def carries(self) -> bool:
        """True if the script has not cleared the gradients of the previous step, and no gradient of
        this step has arrived yet."""
        return not self.came and any(unit.hidden.have_gradients for unit in self._reduced)

    def take_gradients_last(self) -> None:
        """Makes Shoal's gradient hooks run after the user's hooks, because the latter may change
        the gradient. Must be called before each forward pass, because the user may register hooks
        at any time."""
        run_last(self._on_gradients)

    def begin_passes(self) -> None:
        """Starts recording the collectives of a micro-batch's passes."""
        self._pass = []

    def end_passes(self) -> None:
        """Stops recording. Keeps the list of collectives for `take_part`, in which a rank without
        samples must issue the same collectives."""
        if self._pass and not self._collectives.lost:
            # otherwise some collectives were issued twice, and some not at all
            self._whole_pass = self._pass
        self._pass = []

    def refuse_half_a_pass(self) -> None:
        """Raises PreconditionError if a backward pass of this step was aborted by an error. Does
        nothing within a backward pass."""
        if self._in_backward and not in_backward():
            raise half_a_pass()

    def settle(self) -> None:
        """Waits for all collectives in progress and ignores their failures."""
        while self._on_their_way:
            with contextlib.suppress(MembershipChanged):
                # between steps, there is no step to mark as lost
                self._on_their_way.popleft().wait()
        self._leave_backward()
        self._visited, self._root_forwards = [], 0

    def forget(self) -> None:
        """Waits for all collectives in progress, like `settle`, and drops accumulated gradients."""
        self.settle()
        self.came, self.factor = False, None
        self._whereabouts.pending = False
        for unit in self.units:
            unit.forget_gradients()

    def drop_gradients(self) -> None:
        """Drops gradients left from the last step, and gradients already summed in the current
        step. A backward pass through an autograd graph that was built earlier may still produce
        gradients, which get the same weight as before."""
        if self._whereabouts.pending:
            factor = self.factor
            self.forget()
            self.factor = factor
        for unit in self._reduced:
            unit.hidden.drop_gradients()

    def show_gradients(self) -> None:
        """Makes the parameters' `.grad` an ordinary attribute again, before a forward pass in
        training."""
        for unit in self._reduced:
            unit.hidden.show_gradients()

    def resharded(self) -> None:
        """Prepares for a new group: clears the order of blocks, and records that not all of its
        ranks may know which collectives a pass issues."""
        self._order = []
        self._visited = []
        self._all_know = False

    # -------------------------------------------------------------------------------- for the hooks

    def before_forward(self, block: Block, inputs: Any) -> None:
        """Gathers a block before it computes, and starts gathering the next ones."""
        if block is self._root and not self._in_backward:
            if self._root_forwards == 0:
                self._visited = []
            self._root_forwards += 1
        self._gather(block.units)
        if self._in_backward:  # recomputed from a checkpoint
            return
        if torch.is_grad_enabled():
            block.open += 1
            block.begins(inputs)
            follows = when_gradients_come(
                inputs, lambda _: self._after_backward_of(block), mode="all"
            )
            block.passes_gradients = follows or any(unit.trained for unit in block.units)
        if block is not self._order_at(len(self._visited)):
            del self._order[len(self._visited) :]
            self._order.append(block)
        self._visited.append(block)
        for ahead in range(self._prefetch):
            following = self._order_at(len(self._visited) + ahead)
            if following is not None:
                self._start(following.units)

    def after_forward(self, block: Block, output: Any) -> None:
        """Frees a block that has run, or keeps it gathered for its backward pass."""
        is_root = block is self._root
        if self._in_backward:
            return
        if is_root:
            self._root_forwards -= 1
        stays = is_root or self.pinned
        left_behind = block.left_behind()
        if not torch.is_grad_enabled():
            stays = self.pinned  # no backward pass will follow
        elif not when_gradients_come(
            [output, *left_behind], lambda _: self._before_backward(block), mode="any"
        ):
            # The output may be an object whose tensors cannot be found. The block is then freed
            # when the backward pass ends.
            stays = stays or block.passes_gradients
        if not stays:
            for unit in block.units:
                unit.free()

    def show_copies(self, _: Any) -> None:
        """Makes the parameters usable before the module computes, if they are hidden because they
        are only copies of shards."""
        for unit in self.units:
            unit.hidden.show()

    def hide_copies(self, _: Any) -> None:
        """Hides the parameters that `show_copies` has made usable, after the module has computed,
        unless a backward pass may follow."""
        if not torch.is_grad_enabled():
            self.free_all()

    def gradient_ready(self, number: int, index: int) -> None:
        """Processes the gradient of a parameter when a backward pass has accumulated it. `number`:
        index of the unit in the order in which units are reduced. `index`: index of the parameter
        in the unit.

        Raises:
            PreconditionError: the backward pass does not belong to a step.
        """
        if not self._in_backward:
            self.before_backward()
        if self.factor is None:
            raise PreconditionError(
                "a backward pass ran outside a step, because the model was in eval mode when the "
                "step should have begun. Call model.train() before the step, and eval() only on "
                "submodules that must stay in eval mode, or take batches from a Shoal loader"
            )
        self._enter_backward()
        self.came = self._whereabouts.pending = True
        unit = self._reduced[number]
        unit.add_gradient(index, self.factor)
        self._ready[unit] = self._ready.get(unit, 0) + 1
        if (
            self._stage is not Stage.PARAMETERS
            and self.reduces_in_backward
            and self._is_ready(unit)
        ):
            self._reduce_ready(all_of_them=False)

    # ------------------------------------------------------------------------------------- backward

    def _before_backward(self, block: Block) -> None:
        self._enter_backward()
        self._gather(block.units)
        position = next((i for i, visited in enumerate(self._order) if visited is block), 0)
        for ahead in range(1, self._prefetch + 1):
            if ahead <= position and self._order[position - ahead] is not self._order[0]:
                self._start(self._order[position - ahead].units)

    def _after_backward_of(self, block: Block) -> None:
        """Reduces and frees a block once the backward pass has left its module. At that time, all
        gradients of the module are complete, because autograd runs the most recently created nodes
        first and accumulates gradients immediately."""
        self._enter_backward()
        block.open -= 1
        if block.open == 0:
            self._left.update(block.units)
            if block is not self._root and not self.pinned:
                for unit in block.units:
                    unit.free()
            if self.reduces_in_backward:
                self._reduce_ready(all_of_them=False)

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self.before_backward()
            self._in_backward = True
            self._next = 0
            if torch.is_grad_enabled():
                # with create_graph, later passes use the parameters' values again
                self.pinned = True
            self.show_gradients()
            after_backward(self._after_backward)

    def _after_backward(self) -> None:
        if self.reduces_in_backward:
            self._reduce_ready(all_of_them=True)
        self._leave_backward()
        if not torch.is_grad_enabled():
            self.free_all()
        for unit in self._reduced:
            unit.hidden.hide_gradients()

    def _leave_backward(self) -> None:
        self._in_backward = False
        self._ready.clear()
        self._left.clear()
        for block in self._blocks:
            block.open = 0
        self._next = 0

    def _is_ready(self, unit: Unit) -> bool:
        # If units are gathered during passes, the time of a reduction must not depend on which
        # parameters this rank uses.
        return (
            unit in self._left
            if self._stage is Stage.PARAMETERS
            else self._ready.get(unit, 0) >= len(unit.parameters)
        )

    def _reduce_ready(self, *, all_of_them: bool) -> None:
        while self._next < len(self._reduced) and (
            all_of_them or self._is_ready(self._reduced[self._next])
        ):
            self._reduce(self._reduced[self._next])
            self._next += 1

    def _reduce(self, unit: Unit) -> None:
        if len(self._on_their_way) >= _IN_FLIGHT:
            self._on_their_way.popleft().wait()
        self._on_their_way.append(unit.start_reducing(self._collectives))
        self._record("reduce", unit)

    # ------------------------------------------------------------------------------------ gathering

    def _record(self, kind: str, unit: Unit) -> None:
        self._pass.append((kind, unit))
        if self._collectives.lost or (
            kind == "gather" and (unit.resident or self._stage is not Stage.PARAMETERS)
        ):
            return
        what = "gathers the values" if kind == "gather" else "sums the gradients"
        self._issues(
            f"{what} of block {unit.name!r}"
            if unit.name
            else f"{what} of parameters outside all blocks"
        )
        if self._stage is Stage.PARAMETERS:
            self.issued.add(kind, self._numbers[unit])

    def _order_at(self, position: int) -> Block | None:
        return self._order[position] if position < len(self._order) else None

    def _start(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.start_gathering(self._collectives):
                self._record("gather", unit)

    def _gather(self, units: Sequence[Unit]) -> None:
        self._start(units)
        for unit in units:
            unit.finish_gathering()
