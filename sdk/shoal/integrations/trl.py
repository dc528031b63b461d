"""SFTTrainer and DPOTrainer of TRL for an elastic job (docs/guides/trl.md).

TRL prepares the datasets and computes the losses; the loop is that of `Trainer`. Two things would
be wrong without this module:

- TRL collects the values that it logs (entropy, token accuracy, rewards, number of tokens) through
  Accelerate, which sees a single process. They would therefore cover only one rank's samples, and
  would include aborted steps. This module takes the values of each part of a step, exchanges them
  between ranks after the backward passes, and counts them once the step is committed. The counts
  are registered as state.
- The reference model of DPO is not distributed, so nothing compares it between ranks. Here its
  digest is registered as state. Ranks, joiners and checkpoints whose digests differ are refused.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import trl
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.engine.state.parameters import check_unquantized
from shoal_worker.state.digest import state_digest, tensor_digest
from shoal_worker.strategies.model import ShardedModel
from torch import nn
from typing_extensions import override

from shoal.integrations.in_step import InStep
from shoal.integrations.transformers import Trainer, TrainingArguments

_log = logging.getLogger(__name__)

_TOKENS: Final = "num_tokens"
_COUPLED: Final = ("aot", "aot_unpaired", "sft")
"""Losses of DPO that depend on the batch as a whole: they sort its pairs, or average over all its
tokens."""


class SFTConfig(TrainingArguments, trl.SFTConfig):
    """SFTConfig of TRL with the same changes as `TrainingArguments`."""


class DPOConfig(TrainingArguments, trl.DPOConfig):
    """DPOConfig of TRL with the same changes as `TrainingArguments`."""


Part = tuple[int, float, int, dict[str, float]]
"""Index of a part of a step, its weight, its number of tokens, and its values by name."""


class _Counted:
    """Sums of the logged values of all ranks since the last log, and the total number of tokens.
    They are the same on all ranks."""

    def __init__(self, reference: nn.Module | None) -> None:
        """`reference`: the reference model of DPO; None if there is none."""
        self._sums: dict[str, list[float]] = {}
        """Sum and number of each value."""
        self.tokens = 0
        """Tokens of all committed steps."""
        self.reference = "" if reference is None else _digest(reference)
        """Digest of the reference model; empty if there is none."""

    def add(self, parts: Iterable[Part], *, divided: bool) -> None:
        """Adds the values of a committed step. `divided`: True if the parts together form one batch
        and are averaged into one value; False if each part is a micro-batch with its own value."""
        values: dict[str, list[tuple[float, float]]] = {}
        for _, weight, tokens, named in sorted(parts, key=lambda part: part[0]):
            self.tokens += tokens
            for name, value in named.items():
                values.setdefault(name, []).append((value, weight))
        for name, pairs in values.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            if divided:
                weights = math.fsum(weight for _, weight in pairs)
                if weights == 0:  # no part has trained tokens
                    pairs, weights = [(value, 1.0) for value, _ in pairs], float(len(pairs))
                total[0] += math.fsum(value * weight for value, weight in pairs) / weights
                total[1] += 1
            else:
                total[0] += math.fsum(value for value, _ in pairs)
                total[1] += len(pairs)

    def take(self) -> dict[str, float]:
        """Returns the mean of each value since the last call, and the total number of tokens; empty
        if no step has been added since then."""
        means = {name: total / number for name, (total, number) in self._sums.items()}
        self._sums = {}
        return {**means, _TOKENS: self.tokens} if means else {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "counted": json.dumps([self._sums, self.tokens]),
            "reference": self.reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["reference"] != self.reference:
            raise ConfigurationError(
                f"this worker's reference model has the digest {self.reference or 'none'}, but "
                f"that of the run has {state['reference'] or 'none'}; every worker, and every "
                "resumed run, must build the same ref_model, for example with from_pretrained",
                reason="REFERENCE_MODEL_DIFFERS",
            )
        self._sums, self.tokens = json.loads(state["counted"])


class _Trained(Trainer):
    """A Trainer of TRL that logs values of all ranks."""

    _metrics: dict[str, Any]
    """TRL's values since its last log, by mode and name."""
    _total_train_tokens: int
    """TRL's own count of trained tokens."""
    ref_model: Any = None
    """Reference model of DPO."""

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        """
        Args:
            model, args, rest, named: as in TRL's own class and in `Trainer`; `args` is an
                `SFTConfig` or `DPOConfig` of this module.

        Raises:
            ConfigurationError: a different strategy, or arguments that are not supported.
        """
        args = self.arguments_class("tmp_trainer") if args is None else args
        if isinstance(model, str):
            _load_on_one_device(args)
        super().__init__(model, args, *rest, **named)
        self._parts: list[Part] = []
        self._everyones: list[Any] | None = None
        self._in_step = InStep(current_session())
        self._counted = _Counted(self.ref_model)
        self._evaluates = False
        self._warned = False

    @override
    def _register_state(self) -> None:
        super()._register_state()
        current_session().registered.register("trl", self._counted, copied=True)

    # ------------------------------------------------------------------------------------- training

    @override
    def _train_step(self, *args: Any, **named: Any) -> bool:
        self._parts = []
        return super()._train_step(*args, **named)

    @override
    def training_step(self, *args: Any, **named: Any) -> Any:
        self._total_train_tokens = 0
        loss = super().training_step(*args, **named)
        step, index = current_session().step, len(self._parts)
        weight = 1.0 if step is None else float(step.micro_batch or 0.0)
        if step is not None and step.micro_batch_index is not None:
            index = step.micro_batch_index
        tokens, values = self._total_train_tokens, self._take_values("train")
        # a micro-batch without trained tokens has the weight 0, but counts as in TRL
        if weight > 0 or (step is not None and step.weigh is not None):
            self._parts.append((index, weight, int(tokens), values))
        return loss

    @override
    def _passes_done(self) -> None:
        self._everyones = self._in_step.gather(self._parts, kind="TRL's logged values")

    @override
    def _step_optimizer(self, *args: Any) -> tuple[bool, bool]:
        ranks = current_session().world_size
        committed, updated = super()._step_optimizer(*args)
        if committed:
            self._counted.add(
                (part for own in self._received(ranks) for part in own),
                divided=self.args.gradient_accumulation_steps == 1,
            )
        return committed, updated

    def _received(self, ranks: int) -> list[list[Part]]:
        """Returns the parts of all ranks of a committed step; the result is the same on every rank.
        If a rank died while the parts were being exchanged, only some ranks may have received them;
        they then send the parts to the others. If no rank has received them, returns the parts of
        the remaining ranks.

        `ranks`: number of ranks that took part in the step.
        """
        session, everyones, kind = current_session(), self._everyones, "TRL's logged values"
        lacks = collectives.gather(session, everyones is None, kind=kind)
        if everyones is not None and not any(lacks):
            return everyones
        answers = collectives.gather(session, [self._parts, everyones], kind=kind)
        known: list[list[Part]] | None = next((each for _, each in answers if each), None)
        if known is not None:
            return known
        if len(answers) < ranks and not session.is_joining and not self._warned:
            self._warned = True
            _log.warning(
                "a worker died after its passes, before its logged values were exchanged; "
                "num_tokens and the logged values of that step cover only the samples of the "
                "other workers (the loss and the model's parameters are exact)"
            )
        return [own for own, _ in answers]

    def _take_values(self, mode: str) -> dict[str, float]:
        """Returns and removes the values that TRL has recorded for the last batch."""
        noted = self._metrics[mode]
        values = {name: float(each[-1]) for name, each in noted.items() if name != _TOKENS}
        noted.clear()
        return values

    # -------------------------------------------------------------------------- evaluation and logs

    @override
    def evaluate(self, *args: Any, **named: Any) -> Any:
        before, self._evaluates = self._evaluates, True
        try:
            return super().evaluate(*args, **named)
        finally:
            self._evaluates = before

    @override
    def _sums_of_batch(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for name, value in self._take_values("eval").items():
            sums |= {f"sum of {name}": value, f"number of {name}": 1.0}
        return sums

    @override
    def _metrics_of_sums(self, sums: Mapping[str, float]) -> dict[str, float]:
        names = [name.removeprefix("sum of ") for name in sums if name.startswith("sum of ")]
        means = {name: sums[f"sum of {name}"] / sums[f"number of {name}"] for name in names}
        return {**means, _TOKENS: self._counted.tokens}

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self._evaluates:
            logs.update(self._counted.take())
        super().log(logs, start_time)  # TRL's own values have been taken


class SFTTrainer(_Trained, trl.SFTTrainer):
    """SFTTrainer of TRL whose training, as with `Trainer`, survives the death of workers."""

    arguments_class: ClassVar[type[TrainingArguments]] = SFTConfig


class _ArgumentsFirst(trl.DPOTrainer):
    """DPOTrainer of TRL with the order of arguments that `Trainer` uses."""

    def __init__(self, model: Any, args: Any, ref_model: Any = None, **named: Any) -> None:
        super().__init__(model, ref_model, args, **named)


class DPOTrainer(_Trained, _ArgumentsFirst):
    """DPOTrainer of TRL whose training, as with `Trainer`, survives the death of workers.

    Every rank keeps the reference model, if there is one, unsharded.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = DPOConfig

    def __init__(
        self, model: Any = None, ref_model: Any = None, args: Any = None, **named: Any
    ) -> None:
        """
        Args:
            model, ref_model, args, named: as in TRL's own class and in `Trainer`; `args` is a
                `DPOConfig` of this module.

        Raises:
            ConfigurationError: a different strategy, or arguments that are not supported.
        """
        args = DPOConfig("tmp_trainer") if args is None else args
        if isinstance(args, DPOConfig):
            _check_preferences(args)
        if isinstance(ref_model, nn.Module):
            check_unquantized(
                ref_model,
                kind="reference model",
                instead=", or leave out ref_model and train an adapter (peft_config=)",
            )
        if ref_model is None and named.get("peft_config") is None:
            _load_on_one_device(args)  # TRL may load the model again
        super().__init__(model, args, ref_model=ref_model, **named)

    @override
    def _distribute(self) -> ShardedModel:
        if isinstance(self.model_wrapped, ShardedModel):
            return self.model_wrapped
        model = super()._distribute()
        digests = collectives.gather(
            current_session(), self._counted.reference, kind="the digest of the reference model"
        )
        if len({*digests}) > 1:
            found = ", ".join(f"rank {rank}: {each or 'none'}" for rank, each in enumerate(digests))
            raise PreconditionError(
                f"the ranks built different reference models, with the digests {found}; build the "
                "same ref_model on every rank, with from_pretrained, or after torch.manual_seed",
                reason="REFERENCE_MODEL_DIFFERS",
            )
        return model


def _load_on_one_device(args: Any) -> None:
    """Makes TRL load the model on the CPU if it is given by name. The model is then moved to this
    worker's device. By default, TRL spreads the model of a process without peers over all visible
    GPUs."""
    if isinstance(args, trl.SFTConfig | trl.DPOConfig):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}


def _check_preferences(args: Any) -> None:
    """Raises ConfigurationError for unsupported arguments of DPO."""
    if args.sync_ref_model:
        raise ConfigurationError(
            "sync_ref_model=True is not supported by Shoal's DPOTrainer: the reference model is "
            "not part of the run's state, so a joining worker would not receive its changes"
        )
    if args.precompute_ref_log_probs:
        raise ConfigurationError(
            "precompute_ref_log_probs=True is not supported by Shoal's DPOTrainer: every worker "
            "would compute all of them, from its own weights; set it to False"
        )
    found = sorted({*args.loss_type} & {*_COUPLED})
    if found and args.gradient_accumulation_steps == 1:
        raise ConfigurationError(
            f"loss_type={found[0]!r} depends on the batch as a whole, so it is not supported with "
            "gradient_accumulation_steps=1, because a batch is then divided among the workers; "
            "use smaller batches and accumulate them, as in per_device_train_batch_size=8, "
            "gradient_accumulation_steps=4"
        )


def _digest(module: nn.Module) -> str:
    """Returns a digest of a module's parameters and buffers, the same on every device."""
    digests = {name: tensor_digest(value) for name, value in module.state_dict().items()}
    return f"{state_digest(digests):016x}"
