"""Executes a schedule: runs one rank's stages, micro-batch by micro-batch.

torch provides the order of actions (schedule.py) and splits a backward pass into two halves
(`_backward`). This module runs the stages itself instead of using torch's PipelineStage, for the
reasons in docs/explanation/mesh.md#pipelines. It adds weighted gradients to the parameters'
gradients, but does not combine the gradients of several replicas.

When a micro-batch has an input shape for the first time, each activation's shape is sent before the
activation itself. For later micro-batches of the same shape, receivers post their buffers in
advance. Every step begins with a small all-reduce to check that all ranks were given the same
batch; the first stage starts computing during this check.

Everything runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError

from shoal_worker.pipelining.links import Incoming, Links
from shoal_worker.pipelining.micro_batches import Border, MicroBatch, keep_gradients_from
from shoal_worker.pipelining.partial import PartialModel
from shoal_worker.pipelining.schedule import Kind, Schedule
from shoal_worker.randomness import seed_generators
from shoal_worker.torch_internals import stage_backwards

stage_backward_input, stage_backward_weight = stage_backwards()

_HEADER_BYTES: Final = 1024

Loss = Callable[[Any, Any], torch.Tensor]
"""Function that computes a scalar loss from the last stage's output and the targets."""


@dataclass(frozen=True)
class _Shape:
    """Shape and dtype of one tensor between stages."""

    size: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class _BorderShape:
    """The shapes and dtypes of a `Border`'s tensors, as sent to its receiver."""

    shapes: tuple[_Shape, ...]
    wrapped: int
    given: int

    @classmethod
    def of(cls, border: Border) -> _BorderShape:
        return cls(tuple(map(_Shape.of, border.tensors)), border.wrapped, border.given)

    def encoded(self) -> bytes:
        text = json.dumps(
            [[[s.size, s.dtype, s.requires_grad] for s in self.shapes], self.wrapped, self.given]
        ).encode()
        if len(text) > _HEADER_BYTES:
            raise ConfigurationError(
                f"{len(self.shapes)} tensors are passed between two pipeline stages; expected at "
                "most about 20. Pass other cut_points"
            )
        return text.ljust(_HEADER_BYTES)

    @classmethod
    def decoded(cls, data: bytes) -> _BorderShape:
        shapes, wrapped, given = json.loads(data)
        return cls(
            tuple(_Shape(tuple(size), dtype, grad) for size, dtype, grad in shapes), wrapped, given
        )


@dataclass
class _Arriving:
    """A `Border` that is being received."""

    shape: _BorderShape
    tensors: tuple[torch.Tensor, ...]
    incoming: list[Incoming] = field(default_factory=list)

    def wait(self) -> Border:
        for one in self.incoming:
            one.wait()
        for tensor, shape in zip(self.tensors, self.shape.shapes, strict=True):
            tensor.requires_grad_(shape.requires_grad and torch.is_grad_enabled())
        return Border(tensors=self.tensors, wrapped=self.shape.wrapped, given=self.shape.given)


@dataclass
class _Held:
    """Tensors that a forward pass of one stage and micro-batch keeps for its backward pass."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...] | None = None
    """Gradients of the outputs. None if the outputs are losses, whose gradients are 1."""
    weights_later: list[dict[str, Any]] | None = None
    """torch's data for the second half of a split backward pass; None if the pass is not split."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of one pass of a batch through the schedule."""

    losses: list[torch.Tensor]
    """Detached losses by micro-batch; empty if this rank does not have the last stage or there is
    no loss function."""
    outputs: list[Any]
    """Outputs by micro-batch; empty if this rank does not have the last stage or there is a loss
    function."""


class _IntoStage(torch.autograd.Function):
    """Identity function that is applied to a value received from another stage. The value is a leaf
    of the autograd graph, on which torch does not allow in-place operations, but a stage may begin
    with such an operation."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ScheduleExecutor:
    """Runs one rank's stages of a pipeline in a schedule's order."""

    def __init__(self, stages: Mapping[int, PartialModel], stage_count: int, links: Links) -> None:
        """Creates the executor. `stages`: this rank's stages by index."""
        self._stages = dict(stages)
        self._last = stage_count - 1
        self._links = links
        self._shapes: dict[tuple[int, int, bool, bool], _BorderShape] = {}
        """Known shapes of outputs, by stage, signature of the micro-batch, whether gradients are
        computed, and whether the stage is in training mode."""
        self._trainable: tuple[bool, ...] = ()

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        *,
        loss: Loss | None = None,
        scales: Sequence[float] = (),
        observe: Callable[[str, int, int], None] | None = None,
    ) -> Ran:
        """Runs the micro-batches through the pipeline. Must be called on all ranks, with the same
        schedule and micro-batches.

        Args:
            schedule: schedule for this number of micro-batches.
            micro_batches: the micro-batches, in order.
            loss: loss function; None: forward passes only, without gradients.
            scales: factor for each micro-batch's loss, applied before the backward pass.
            observe: called with ("before" or "after", stage, micro-batch) around each forward pass.

        Raises:
            MembershipChanged: another rank failed or left.
            ConfigurationError: ranks were given different batches, or pipelines do not support this
                model or loss.
        """
        with (
            self._links.ending_on_failure("a pipeline step"),
            torch.set_grad_enabled(loss is not None),
            _generators_kept(micro_batches, self._links.device),
        ):
            agree = self._agree(micro_batches)
            ran = _Pass(self, schedule, micro_batches, loss, scales, observe).run(agree)
            self._links.finish_sends()
        return ran

    def _agree(self, micro_batches: Sequence[MicroBatch]) -> Callable[[], None]:
        """Starts a comparison across ranks: whether all of them were given batches of the same
        shapes, and whether any rank has frozen or unfrozen parameters. If any has, all ranks forget
        the known shapes.

        Returns a function that waits for the result and applies it. Nothing may be sent to another
        stage before that function has returned.
        """
        trainable = tuple(
            p.requires_grad for stage in self._stages.values() for p in stage.held_parameters
        )
        kinds = hash((len(micro_batches), *(one.signature for one in micro_batches))) >> 2
        said = torch.tensor(
            [kinds, -kinds, int(trainable != self._trainable)],
            dtype=torch.int64,
            device=self._links.device,
        )
        compared = self._links.start_all_reduce(
            said, "comparing the ranks' batches", dist.ReduceOp.MAX
        )

        def agree() -> None:
            compared()
            highest, lowest, changed = said.tolist()
            if highest != -lowest:
                raise ConfigurationError(
                    "the ranks of one pipeline were given batches of different shapes, but all "
                    "ranks of a replica must pass the same batch; choose the batch by "
                    "model.data_parallel_rank, the index of the replica"
                )
            if changed:
                self._shapes.clear()
                self._trainable = trainable

        return agree


class _Pass:
    """One pass of a batch through the schedule."""

    def __init__(
        self,
        engine: ScheduleExecutor,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        loss: Loss | None,
        scales: Sequence[float],
        observe: Callable[[str, int, int], None] | None,
    ) -> None:
        self._stages, self._last, self._links, self._shapes = (
            engine._stages,
            engine._last,
            engine._links,
            engine._shapes,
        )
        self._schedule, self._micro_batches, self._loss, self._scales = (
            schedule,
            micro_batches,
            loss,
            scales,
        )
        self._observe = observe or (lambda *_: None)
        self._splits = any(
            action.kind is Kind.BACKWARD_WEIGHT for action in schedule.actions[self._links.rank]
        )
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        self._returning: dict[
            tuple[int, int], tuple[tuple[torch.Tensor | None, ...], list[Incoming]]
        ] = {}
        self._leaving: dict[tuple[int, int], Border] = {}
        self._gradients_leaving: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._results: list[Any] = []

    def run(self, agree: Callable[[], None]) -> Ran:
        """Runs the pass. `agree`: called before the first transfer from or to another stage. The
        first stage may start computing before that call."""
        does = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }
        agreed = False
        for action in self._schedule.actions[self._links.rank]:
            if not agreed and action.kind is not Kind.FORWARD:
                agree()
                agreed = True
            try:
                does[action.kind](action.stage, action.micro_batch)
            except (
                Exception
            ) as error:  # any error is raised again, with its location in the pipeline
                error.add_note(
                    f"in pipeline stage {action.stage}, micro-batch {action.micro_batch}, "
                    f"{action.kind.name.lower()}"
                )
                raise
        if not agreed:  # a pipeline with one rank, without gradients
            agree()
        results = self._results
        return Ran(losses=results if self._loss else [], outputs=[] if self._loss else results)

    # -------------------------------------------------------------------------------------- forward

    def _forward(self, stage: int, index: int) -> None:
        batch = self._micro_batches[index]
        arriving = self._arriving.pop((stage, index), None)
        received = None if arriving is None else arriving.wait()
        self._observe("before", stage, index)
        if batch.seed is not None:
            # random numbers must not depend on the schedule or on the rank of the stage
            seed_generators((batch.seed, stage))
        output = self._stages[stage](
            None if received is None else _into_stage(received), batch.call
        )
        outputs = (
            self._finish(output, index)
            if stage == self._last
            else self._hand_on(output, stage, index)
        )
        self._observe("after", stage, index)
        if self._loss is not None:
            self._held[stage, index] = _Held(() if received is None else received.tensors, outputs)

    def _finish(self, output: Any, index: int) -> tuple[torch.Tensor, ...]:
        """Completes a forward pass of the last stage: computes and returns the loss, or records the
        output if there is no loss function."""
        if self._loss is None:
            self._results.append(output)
            return ()
        loss = self._loss(output, self._micro_batches[index].targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigurationError(
                f"the loss of a micro-batch is {got}; expected a tensor of one element"
            )
        weighs = self._scales[index] != 0
        if not weighs:
            # the gradient may not be finite, for example if the loss is a mean over no tokens
            keep_gradients_from(output)
        self._results.append(loss.detach().clone() if weighs else torch.zeros_like(loss.detach()))
        return (loss * self._scales[index],)

    def _hand_on(self, border: Border, stage: int, index: int) -> tuple[torch.Tensor, ...]:
        """Passes a stage's output to the next stage, or stores it for sending if that stage is on a
        different rank."""
        if self._splits and any(one._is_view() for one in border.tensors):
            # torch's split backward pass detaches outputs in place, which is not possible for
            # views.
            border = Border(
                tensors=tuple(t.clone() for t in border.tensors),
                wrapped=border.wrapped,
                given=border.given,
            )
        if stage + 1 in self._stages:
            handed = tuple(t.detach().requires_grad_(t.requires_grad) for t in border.tensors)
            self._arriving[stage + 1, index] = _Arriving(_BorderShape.of(border), handed)
        else:
            self._leaving[stage, index] = border
        return border.tensors

    def _send_forward(self, stage: int, index: int) -> None:
        border, peer = self._leaving.pop((stage, index)), self._schedule.rank_of[stage + 1]
        shape, known = _BorderShape.of(border), self._shapes.get(self._key(stage, index))
        if known is None:
            header = torch.frombuffer(bytearray(shape.encoded()), dtype=torch.uint8).to(
                self._links.device
            )
            self._links.send(header, peer, f"sending stage {stage + 1} the shape of its input")
            self._links.traffic.headers += header.numel()
            self._shapes[self._key(stage, index)] = shape
        elif known != shape:
            raise ConfigurationError(
                f"pipeline stage {stage} returned tensors of {shape.shapes}, but {known.shapes} "
                "before for inputs of the same shapes; the shapes passed between stages must "
                "depend only on the shapes of the inputs"
            )
        for tensor in border.tensors:
            self._links.send(
                tensor, peer, f"sending the activation of micro-batch {index} to stage {stage + 1}"
            )
            self._links.traffic.activations += tensor.numel() * tensor.element_size()

    def _receive_forward(self, stage: int, index: int) -> None:
        peer = self._schedule.rank_of[stage - 1]
        what = f"waiting for the activation of micro-batch {index} from stage {stage - 1}"
        key = self._key(stage - 1, index)
        if key not in self._shapes:
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._links.device)
            self._links.receive(header, peer, what).wait()
            self._shapes[key] = _BorderShape.decoded(header.cpu().numpy().tobytes())
        tensors = tuple(shape.empty(self._links.device) for shape in self._shapes[key].shapes)
        incoming = [self._links.receive(tensor, peer, what) for tensor in tensors]
        self._arriving[stage, index] = _Arriving(self._shapes[key], tensors, incoming)

    def _key(self, stage: int, index: int) -> tuple[int, int, bool, bool]:
        training = next(iter(self._stages.values())).training
        return stage, self._micro_batches[index].signature, self._loss is not None, training

    # ------------------------------------------------------------------------------------- backward

    def _backward(self, stage: int, index: int) -> None:
        held = self._with_gradients(stage, index)
        self._whole_backward(held)
        del self._held[stage, index]
        self._hand_back(held, stage, index)

    def _backward_input(self, stage: int, index: int) -> None:
        held = self._with_gradients(stage, index)
        if len(held.outputs) > 1:
            # torch's split backward pass only finds parameters that are reachable from an input.
            # With several outputs, some parameters may contribute to only one of them.
            self._whole_backward(held)
            held.weights_later = []
        elif any(one.requires_grad for one in held.inputs) and held.outputs[0].requires_grad:
            of_outputs: Any = held.gradients
            try:
                found, held.weights_later = stage_backward_input(
                    list(held.outputs),
                    of_outputs,
                    list(held.inputs),
                    iter(self._stages[stage].held_parameters),
                )
            except RuntimeError as error:  # torch raises it from the original error
                raise error.__cause__ or error from None
            if all(one is None for one in found):
                raise ConfigurationError(
                    f"the output of stage {stage} does not depend on its input, so its backward "
                    "pass cannot be split; use another schedule"
                )
        # If no input requires a gradient, torch's split backward pass finds no parameters; the
        # second half is then the entire pass.
        self._hand_back(held, stage, index)

    def _backward_weight(self, stage: int, index: int) -> None:
        held = self._held.pop((stage, index))
        if held.weights_later is None:
            self._whole_backward(held)
        else:
            stage_backward_weight(iter(self._stages[stage].held_parameters), held.weights_later)

    def _with_gradients(self, stage: int, index: int) -> _Held:
        held = self._held[stage, index]
        if stage < self._last:
            held.gradients, incoming = self._returning.pop((stage, index))
            for one in incoming:
                one.wait()
        return held

    def _whole_backward(self, held: _Held) -> None:
        pairs = [
            (output, None if held.gradients is None else held.gradients[i])
            for i, output in enumerate(held.outputs)
            if output.requires_grad
        ]
        if pairs:
            torch.autograd.backward(
                [output for output, _ in pairs], [gradient for _, gradient in pairs]
            )

    def _hand_back(self, held: _Held, stage: int, index: int) -> None:
        """Passes the gradients of a stage's inputs to the previous stage: one for each received
        tensor that requires a gradient."""
        if stage == 0:
            return
        gradients = tuple(
            (torch.zeros_like(one) if one.grad is None else one.grad) if one.requires_grad else None
            for one in held.inputs
        )
        for one in held.inputs:
            one.grad = None
        if stage - 1 in self._stages:
            self._returning[stage - 1, index] = (gradients, [])
        else:
            self._gradients_leaving[stage, index] = tuple(
                one for one in gradients if one is not None
            )

    def _send_backward(self, stage: int, index: int) -> None:
        peer = self._schedule.rank_of[stage - 1]
        for gradient in self._gradients_leaving.pop((stage, index)):
            self._links.send(
                gradient, peer, f"sending the gradient of micro-batch {index} to stage {stage - 1}"
            )
            self._links.traffic.gradients += gradient.numel() * gradient.element_size()

    def _receive_backward(self, stage: int, index: int) -> None:
        peer = self._schedule.rank_of[stage + 1]
        what = f"waiting for the gradient of micro-batch {index} from stage {stage + 1}"
        shapes = self._shapes[self._key(stage, index)].shapes
        gradients = tuple(
            shape.empty(self._links.device) if shape.requires_grad else None for shape in shapes
        )
        self._returning[stage, index] = (
            gradients,
            [self._links.receive(one, peer, what) for one in gradients if one is not None],
        )


def _into_stage(received: Border) -> Border:
    if not torch.is_grad_enabled():
        return received
    into_stage: Callable[[torch.Tensor], torch.Tensor] = _IntoStage.apply
    tensors = tuple(into_stage(one) if one.requires_grad else one for one in received.tensors)
    return Border(tensors=tensors, wrapped=received.wrapped, given=received.given)


def _generators_kept(
    micro_batches: Sequence[MicroBatch], device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that restores the state of torch's random generators on exit. If no
    micro-batch has a seed, the context has no effect."""
    seeded = any(one.seed is not None for one in micro_batches)
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices) if seeded else contextlib.nullcontext()
