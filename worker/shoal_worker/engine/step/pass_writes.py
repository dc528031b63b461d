"""Detects and undoes changes that a forward or backward pass makes to anything except buffers and
gradients: to parameters, to tensors and numbers in module attributes, and to extra state.

An aborted step is repeated, so all these changes are undone. If a pass writes to a parameter (as in
momentum encoders, initialization from the first batch, or weight clipping), it must do so
identically on all ranks. A digest of the written parameters is therefore part of the step vote. If
ranks have only parts of parameters, such writes would be lost, and are refused.

Writes are detected from torch's count of in-place changes and from a parameter's memory address.
torch does not count writes through `.data`: they are detected by digests in the first step of a
process, and later by sampled elements of each parameter in host memory. Once a parameter has been
written, a copy of it is made in every step. Before its first write, a copy exists only if the model
is small. In a larger model, the first write to a parameter cannot be undone. This is an error if
the step is aborted or has micro-batches.

What the script writes to parameters between two steps has a separate digest in the step vote. If
this digest differs between ranks, they compare all parameters before the step is applied.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn

from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.state.digest import digest_of

_log = logging.getLogger(__name__)

_SMALL: Final = 1 << 26
"""Maximum size in bytes of a model whose parameters are copied in the first step."""
_SAMPLED: Final = 8
"""Number of elements sampled from each parameter, to detect writes that torch does not count."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size of an element in bytes."""
_NUMBERS: Final = frozenset({int, float})
_TENSORS: Final = frozenset({torch.Tensor})


class WrittenParameters:
    """Detects which parameters have been written since the step began, and can restore them. Owned
    by the training thread."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        strategy: str,
        *,
        stay: bool = True,
        compared: bool = True,
        whole: bool = False,
    ) -> None:
        """`parameters`: pairs of name and parameter. `stay`: True if only the script can change a
        parameter's memory address. `compared`: True if the parameters have their values between
        passes, so that values can be compared. `whole`: True if every rank has all parameters, even
        between steps."""
        self._stay = stay
        self._named = [(name, parameter) for name, parameter in parameters if not parameter.is_meta]
        self._strategy = strategy
        self._copies: dict[int, torch.Tensor] = {}
        """Values of the parameters known to be written, at the step's beginning."""
        self._digests: list[int] = []
        """Digests of all parameters at the beginning of the process's first step; empty in later
        steps."""
        self._seen: list[tuple[int, int]] = []
        """Version and memory address of each parameter at the step's beginning. Empty if no step
        has begun that could be aborted."""
        self._watched: set[int] = set()
        """Indices of parameters known to be written."""
        self._written: list[int] = []
        """Indices of parameters that were written in this step; empty until they have been
        determined."""
        self._updating = False
        """True if an optimizer changes parameters within the step. `_written` then lists the
        passes' writes."""
        self._first = compared
        self._within: int | None = None
        """Digest of the writes of the step's first micro-batch."""
        self._elements = (
            SampledElements([parameter for _, parameter in self._named]) if whole else None
        )
        self._sampled: torch.Tensor | None = None
        """Sampled elements of each parameter at the step's beginning."""
        self._committed: tuple[list[tuple[int, int]], torch.Tensor | None] | None = None
        """Versions, addresses and sampled elements of the parameters at the last commit; None if no
        step has been committed since the parameters were loaded."""
        self._noted: dict[int, torch.Tensor | None] = {}
        """Values at the last commit of parameters that the script writes between steps, by index
        (see `overwritten`). None before the first commit after such a write."""
        self.between = 0
        """Digest of the writes since the last commit; 0 if there were none. An aborted step does
        not change it."""

    @property
    def known(self) -> list[str]:
        """Names of parameters known to be written."""
        return [self._named[index][0] for index in sorted(self._watched)]

    @torch.no_grad()
    def watch(self, names: Iterable[str]) -> None:
        """Marks parameters as known to be written in forward or backward passes. `names`: as
        reported by a peer (`known`)."""
        known = frozenset(names)
        self._watched |= {index for index, (name, _) in enumerate(self._named) if name in known}

    @torch.no_grad()
    def begin(self) -> None:
        """Begins a step: records the parameters' state, and copies the values of parameters known
        to be written."""
        named, wanted = self._named, self._watched
        self._seen, self._sampled = self._look_between_steps()
        self._within, self._digests, self._written = None, [], []
        self._updating = False
        if self._first:
            if sum(parameter.nbytes for _, parameter in named) <= _SMALL:
                wanted = set(range(len(named)))
            self._digests = [digest_of([parameter]) for _, parameter in named]
        self._copies = {index: value for index, value in self._copies.items() if index in wanted}
        for index in wanted:
            value = named[index][1].detach()
            if index in self._copies and self._copies[index].shape == value.shape:
                self._copies[index].copy_(value)
            else:
                self._copies[index] = value.clone()

    def _look_between_steps(self) -> tuple[list[tuple[int, int]], torch.Tensor | None]:
        """Updates the digest of writes since the last commit. Returns the parameters' versions and
        addresses, and sampled elements."""
        now, elements = self._sight(), self._sample()
        if self._committed is not None:
            self.between = self._digest_of_changes(*self._committed, now, elements)
        return now, elements

    def _digest_of_changes(
        self,
        seen: list[tuple[int, int]],
        sampled: torch.Tensor | None,
        now: list[tuple[int, int]],
        elements: torch.Tensor | None,
    ) -> int:
        """Returns a digest of the parameters that have changed between two observations of
        versions, addresses and sampled elements; 0 if none have."""
        if now == seen and _equal(elements, sampled):
            return 0
        changed = {
            index
            for index, (before, after) in enumerate(zip(seen, now, strict=True))
            if before != after
        }
        changed |= self._sampled_otherwise(sampled, elements)
        if not changed:
            return 0
        with inside():
            digests = {
                self._named[index][0]: digest_of([self._named[index][1].detach()])
                for index in sorted(changed)
            }
        return xxhash.xxh3_64_intdigest(repr(digests).encode()) or 1

    def _sight(self) -> list[tuple[int, int]]:
        with inside():
            if self._stay:
                return [(parameter._version, parameter.data_ptr()) for _, parameter in self._named]
            return [(parameter._version, 0) for _, parameter in self._named]

    def _sample(self) -> torch.Tensor | None:
        if self._elements is None:
            return None
        with inside():
            return self._elements.take()

    def _sampled_otherwise(self, before: torch.Tensor | None, now: torch.Tensor | None) -> set[int]:
        """Returns the indices of parameters whose sample has changed; empty if the samples cannot
        be compared."""
        if before is None or now is None or self._elements is None or before.shape != now.shape:
            return set()
        return self._elements.owners(before != now)

    def _changed(self) -> list[int]:
        """Returns the indices of the parameters written in this step. Omits parameters whose values
        are known to be unchanged, because a write that changes nothing may happen on only some
        ranks."""
        if self._updating:
            return self._written
        if not self._seen:
            return []
        now, elements = self._sight(), self._sample()
        if (
            not self._copies
            and not self._digests
            and now == self._seen
            and _equal(elements, self._sampled)
        ):
            return []
        changed = {
            index
            for index, (before, after) in enumerate(zip(self._seen, now, strict=True))
            if before != after
        }
        changed |= self._sampled_otherwise(self._sampled, elements)
        for index, (_, parameter) in enumerate(self._named):
            if index in self._copies:
                written = not same(parameter.detach(), self._copies[index])
            elif self._digests:
                written = digest_of([parameter]) != self._digests[index]
            else:
                continue
            (changed.add if written else changed.discard)(index)
        return sorted(changed)

    def names(self) -> list[str]:
        """Returns the names of parameters that were written in this step."""
        return [self._named[index][0] for index in self._changed()]

    @torch.no_grad()
    def names_beyond_rounding(self) -> list[str]:
        """Returns the names of written parameters, except those that were changed and then restored
        through `.data`, so that their sampled elements differ only by rounding."""
        changed = self._changed()
        if self._elements is None or self._digests or not self._seen:
            return [self._named[index][0] for index in changed]
        versions, elements = self._sight(), self._sample()
        restored = {
            index
            for index in self._sampled_otherwise(self._sampled, elements)
            if versions[index] == self._seen[index]
            and self._elements.about_equal(index, self._sampled, elements)
        }
        return [self._named[index][0] for index in changed if index not in restored]

    def digest(self) -> int:
        """Returns a digest of the written parameters and their values; 0 if there are none."""
        changed = self._written = self._changed()
        if not changed:
            return 0
        digests = [digest_of([self._named[index][1].detach()]) for index in changed]
        return xxhash.xxh3_64_intdigest(repr([changed, digests]).encode()) or 1

    @torch.no_grad()
    def micro_batch_begins(self) -> None:
        """Restores written parameters to their values at the beginning of the first micro-batch, so
        that the next micro-batch starts from the same values."""
        if self._within:
            changed = self._changed()
            if lacking := self._lacking(changed):
                raise PreconditionError(
                    f"parameter {lacking[0]!r} was written for the first time in the passes of a "
                    "step with micro-batches (for example by forward()). The next micro-batch "
                    "needs the earlier value, which is not kept in a model of more than "
                    f"{_SMALL >> 20} MiB; write the parameter between two steps, in the same way "
                    "on all ranks",
                    reason="PARAMETERS_WRITTEN",
                )
            self._write_back(changed)

    def micro_batch_ends(self) -> None:
        """Checks that this micro-batch wrote the same values as this rank's earlier micro-batches;
        otherwise raises ConfigurationError."""
        found = self.digest()
        if self._within is not None and found != self._within:
            raise self.apart(self.names())
        self._within = found

    def apart(self, names: list[str]) -> ConfigurationError:
        """Returns the error to raise if ranks or micro-batches have written different values to
        parameters. `names`: names of parameters that this rank has written."""
        what = (
            f"parameters {names[:3]} were written"
            if names
            else "another rank wrote a parameter or a buffer"
        )
        return ConfigurationError(
            f"{what} in the passes of a step (for example by forward()), or in a worker that "
            "joined, before its first batch (for example by load_full() between two loops), to "
            "values that differ between ranks or micro-batches, so the replicas would drift "
            "apart. Compute the value from the whole batch (shoal.whole_batch(x)), write it once "
            "before as_distributed, or keep it in a buffer, whose changes are averaged; write "
            "between two loops only `if not shoal.is_joining():`, because a joining worker has "
            "already received the other workers' values",
            reason="PARAMETERS_WRITTEN",
        )

    def refuse(self, *, unless: Callable[[], bool] = bool) -> None:
        """Checks that no parameter was written, because this strategy would lose the values;
        otherwise raises ConfigurationError. `unless`: function that returns True if a collective
        has failed. In that case, raises nothing, because the step is aborted anyway."""
        names = self.names()
        if names and not unless():
            raise written_in_vain(names[0], self._strategy)

    @torch.no_grad()
    def overwritten(self) -> list[str]:
        """Returns the names of parameters that the script has written since the last `note`. A
        parameter that was changed and then restored is not reported, even if it differs by
        rounding.

        Most writes change the sampled elements. If only torch's count of in-place changes shows
        that a parameter has been written, its earlier values are not known, and the write may have
        been undone. In this case, the first such write only causes a warning. From then on, all
        elements of that parameter are compared.
        """
        if self._committed is None or self._elements is None:
            return []
        (seen, before), (counts, now) = self._committed, (self._sight(), self._sample())
        written = {
            index
            for index in self._sampled_otherwise(before, now)
            if not self._elements.about_equal(index, before, now)
        }
        unknown = []
        for index, (earlier, later) in enumerate(zip(seen, counts, strict=True)):
            if index not in self._noted:
                if earlier != later and index not in written:
                    self._noted[index] = None
                    unknown.append(self._named[index][0])
                continue
            value, noted = self._named[index][1], self._noted[index]
            if noted is not None and not same(value, noted) and not about_equal(noted, value):
                written.add(index)
        if unknown:
            _log.warning(
                "parameter %r%s was written between two steps. With strategy=%r such a write is "
                "lost unless the script undoes it before the next step, because values from the "
                "parameter servers overwrite it. This warning appears once for each parameter; "
                "from now on all of its elements are compared, and a write that is not undone "
                "raises PARAMETERS_WRITTEN",
                unknown[0],
                f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "",
                self._strategy,
            )
        return [self._named[index][0] for index in sorted(written)]

    def update_begins(self) -> None:
        """Records that an optimizer step begins although the outcome of the step is not known yet.
        Changes from now on are not regarded as writes. Must be called after `digest`."""
        self._updating = True

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores the parameters' values at the step's beginning. Raises PreconditionError if
        these values were not copied."""
        changed, self._first = self._changed(), False
        if lacking := self._lacking(changed):
            raise PreconditionError(
                f"parameter {lacking[0]!r} was written for the first time in the passes of a step "
                "that was lost (for example by forward()), so its previous value was not kept; "
                "end this run, and continue from a checkpoint with shoal.resume",
                reason="PARAMETERS_WRITTEN",
            )
        self._write_back(changed)
        self._seen, self._updating, self._committed = [], False, None

    def _lacking(self, changed: list[int]) -> list[str]:
        """Returns the names of the written parameters whose values at the step's beginning were not
        kept."""
        return [self._named[index][0] for index in changed if index not in self._copies]

    def _write_back(self, changed: list[int]) -> None:
        for index in changed:
            self._named[index][1].data.copy_(self._copies[index])
        self._seen, self._sampled = self._sight(), self._sample()

    def commit(self) -> None:
        """Commits the writes that the last `digest` covers. The written parameters are copied in
        every later step."""
        self._watched |= set(self._written)
        self.forget()
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Records the state of the parameters at a commit. Writes from now until the next step
        begins are regarded as writes between steps."""
        self._committed, self.between = (self._sight(), self._sample()), 0
        for index, noted in self._noted.items():
            value = self._named[index][1].detach()
            self._noted[index] = value.clone() if noted is None else noted.copy_(value)

    def forget(self) -> None:
        """Discards the record of the step's beginning, so that the current values are kept."""
        self._first, self._digests, self._seen = False, [], []
        self._updating = False

    def replaced(self) -> None:
        """Records that the parameters are replaced, by a loaded state or an update. Changes before
        the next step begins are not regarded as writes."""
        self.forget()
        self._committed, self.between = None, 0

    @torch.no_grad()
    def moving(self) -> None:
        """Prepares for the parameters' move to other memory, so that the move is not taken for a
        write."""
        self._look_between_steps()
        self._committed = None


class SampledElements:
    """Reads a few elements of each of several tensors, with a single torch operation. Omits tensors
    that are not in host memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._addresses: list[int] = []
        self._views: list[torch.Tensor] = []
        self._owners: list[int] = []
        """Index of each sampled element's tensor."""

    def take(self) -> torch.Tensor:
        """Returns a copy of the sampled elements' bits, all converted to one dtype."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._addresses, self._views, self._owners = addresses, [], []
            for index, tensor in enumerate(self._tensors):
                view = some_of(tensor)
                self._views.append(view)
                self._owners.extend([index] * view.numel())
        return torch.cat(self._views) if self._views else torch.empty(0, dtype=torch.uint8)

    def about_equal(self, index: int, before: Any, now: Any) -> bool:
        """Returns whether the elements of the tensor with this index are equal in two samples
        except for rounding (`about_equal`)."""
        mine = torch.tensor(self._owners) == index
        dtype = self._tensors[index].dtype
        bits = _BITS[dtype.itemsize]
        one, other = (sample[mine].to(bits).view(dtype) for sample in (before, now))
        return about_equal(one, other)

    def owners(self, marked: torch.Tensor) -> set[int]:
        """Returns the indices of the tensors that have a marked element. `marked`: one flag per
        sampled element."""
        return {self._owners[place] for place in marked.nonzero().view(-1).tolist()}


def some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view of the bits of a few elements of a tensor in host memory. The elements
    are spread over the entire tensor if it is contiguous, otherwise over its first dimension. For
    complex numbers, the view contains only the real parts. It is empty if the tensor is not in host
    memory."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).select(-1, 0)
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    while tensor.dim() > 1:
        tensor = tensor.select(-1, 0)
    tensor = tensor.view(-1) if not tensor.dim() else tensor
    some = tensor[:: max(1, -(-tensor.numel() // _SAMPLED))]
    return some.view(_BITS[some.element_size()])  # torch.cat has no common dtype for some floats


def _equal(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return tensor is other or (
        tensor is not None and other is not None and torch.equal(tensor, other)
    )


def written_in_vain(name: str, strategy: str) -> ConfigurationError:
    """Returns the error for a parameter that was written although ranks have only parts of it."""
    return ConfigurationError(
        f"parameter {name!r} was written in the passes of a step (for example by forward()): with "
        f"strategy={strategy!r}, passes use a copy or a part of the parameter, and the written "
        "values would be lost. Use strategy='ddp', 'zero1' or 'zero2', keep the value in a "
        "buffer, or write it between steps with model.with_parameters(values)",
        reason="PARAMETERS_WRITTEN",
    )


def about_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two floating-point tensors differ by no more than the rounding error of
    adding and then subtracting a value of similar size."""
    if one.shape != other.shape:
        return False
    error = 4 * torch.finfo(one.dtype).eps * one.abs().max()
    return bool(((one - other).abs() <= error).all())


def same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same values. NaNs count as equal."""
    if value.shape != other.shape:
        return False
    return torch.equal(value, other) or digest_of([value]) == digest_of([other])


class ModuleAttributes:
    """Copies, at the step's beginning, the tensors and numbers in plain attributes of modules and
    the modules' extra state, so that they can be restored."""

    def __init__(self, module: nn.Module, *, numbers: bool = True) -> None:
        """`numbers`: True to restore numbers in attributes too; False to leave them unchanged,
        because they belong to the script."""
        # torch's own layers have no attributes that a pass changes.
        self._parts = [
            part
            for part in module.modules()
            if not type(part).__module__.startswith("torch.nn.modules.")
        ]
        self._numbers = _NUMBERS if numbers else frozenset()
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Tensors at the step's beginning, by identity: the tensor, its version, and a copy of its
        values."""
        self._extra: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begins a step: copies the current attributes and extra state."""
        self._before, known, self._copies = [], self._copies, {}
        self._extra = []
        for part in self._parts:
            attributes = part.__dict__
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                self._extra.append((part, copy.deepcopy(part.get_extra_state())))
            kept = attributes.copy()
            if not _TENSORS.isdisjoint(map(type, kept.values())):
                for name, value in attributes.items():
                    if type(value) is torch.Tensor:
                        self._keep(kept, name, value, known)
            self._before.append((part, kept))

    def _keep(
        self, kept: dict[str, Any], name: str, value: torch.Tensor, known: Mapping[int, Any]
    ) -> None:
        if value.grad_fn is not None or value.is_inference():
            del kept[name]  # otherwise it would keep a pass's memory alive
            return
        before = known.get(id(value))
        if before is not None and before[0] is value and before[1] == value._version:
            self._copies[id(value)] = before
        else:
            self._copies[id(value)] = (value, value._version, value.detach().clone())

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores the attributes and extra state after an aborted step."""
        for part, kept in self._before:
            attributes = part.__dict__
            for name in [
                name
                for name, value in attributes.items()
                if type(value) is torch.Tensor and name not in kept
            ]:
                if attributes[name].grad_fn is None:
                    del attributes[name]
            for name, value in kept.items():
                now = attributes.get(name)
                if now is not value and (
                    type(value) in self._numbers
                    or type(now) is torch.Tensor
                    or type(value) is torch.Tensor
                ):
                    attributes[name] = value
        for value, version, copied in self._copies.values():
            if value._version != version:
                value.data.copy_(copied)
        for part, state in self._extra:
            part.set_extra_state(copy.deepcopy(state))

    def forget(self) -> None:
        """Discards the copy after a committed step, so that the current attributes and extra state
        are kept."""
        self._before, self._extra = [], []
