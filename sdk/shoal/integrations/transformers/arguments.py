"""`TrainingArguments` for a process of an elastic job, and checks that reject arguments that
Shoal's Trainer does not support."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from shoal_common.errors import ConfigurationError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.object_storage import is_url, local_path
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import has_length

STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
"""Strategies that train the model with the Trainer's own forward and backward passes. All others
train with `train_step`, or are not synchronous data parallelism."""

_REFUSED: Final[Mapping[str, tuple[Any, str]]] = {
    "auto_find_batch_size": (False, "the batch size is the same on all workers; set it yourself"),
    "batch_eval_metrics": (
        False,
        "batches are evaluated on all workers; compute_metrics receives all predictions at the end",
    ),
    "bf16_full_eval": (False, "evaluation uses the model's own precision; bf16=True autocasts"),
    "deepspeed": (None, "set strategy= to shard the model"),
    "enable_jit_checkpoint": (
        False,
        "workers that are asked to leave stop at the same step boundary, and train() saves there "
        "automatically",
    ),
    "fp16_full_eval": (False, "evaluation uses the model's own precision; fp16=True autocasts"),
    "fsdp": (None, "use Shoal's strategy='fsdp'"),
    "include_for_metrics": ([], "only predictions and labels are gathered"),
    "include_num_input_tokens_seen": ("no", "each worker would count only its own tokens"),
    "parallelism_config": (None, "set strategy= to shard the model"),
    "push_to_hub": (False, "call trainer.save_model(directory), and upload the result"),
    "torch_compile": (False, "pass the Trainer a compiled model, torch.compile(model)"),
}
"""Unsupported arguments, each with its default value and its alternative."""


_SURROUNDINGS: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "ACCELERATE_TORCH_DEVICE",
)
"""Variables that Accelerate uses to determine its peers and its device."""


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Makes Accelerate treat this process as the only one, on `device`, within the block."""
    before = {name: os.environ.pop(name) for name in _SURROUNDINGS if name in os.environ}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    try:
        yield
    finally:
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.update(before)


class TrainingArguments(transformers.TrainingArguments):
    """transformers' TrainingArguments for a process that transformers treats as the only one, on
    `shoal.device()`.

    Creating the arguments joins the job (`shoal.init()`). They must be created before the Trainer.
    """

    output_dir: str
    """Directory or URL for checkpoints."""
    use_cpu: bool
    """True to ignore GPUs. Set to True automatically if there are none."""

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()  # as in `shoal.device()`
        super().__post_init__()
        if self.output_dir.startswith("file://"):
            self.output_dir = str(local_path(self.output_dir))

    @cached_property
    def _setup_devices(self) -> torch.device:
        device = current_session().device
        if self.use_cpu and device.type != "cpu":
            raise ConfigurationError(
                "use_cpu=True, but this worker has a GPU; set CUDA_VISIBLE_DEVICES= (empty) for "
                "`shoal run` instead"
            )
        AcceleratorState._reset_state(reset_partial_state=True)
        with _alone(device):
            self.distributed_state = PartialState(cpu=device.type == "cpu")
        self._n_gpu = int(device.type == "cuda")
        return device

    @property
    def process_index(self) -> int:
        """0 in the process that writes files and logs, otherwise a positive number. If that process
        dies, another process takes over and gets index 0."""
        session = current_session()
        return 0 if session.is_first else max(1, session.rank)

    @property
    def local_process_index(self) -> int:
        """Index on this machine as reported to transformers: the same as `process_index`."""
        return self.process_index


def check_class(trainer: type) -> None:
    """Raises ConfigurationError for Trainers of TRL that are not in shoal.integrations.trl."""
    of_trl = [one for one in trainer.__mro__ if one.__module__.partition(".")[0] == "trl"]
    if of_trl and all(one.__module__ != "shoal.integrations.trl" for one in trainer.__mro__):
        raise ConfigurationError(
            f"{trainer.__name__} inherits from TRL's {of_trl[0].__name__}, whose logged values or "
            "generated texts would cover one worker's samples only; expected SFTTrainer or "
            "DPOTrainer of shoal.integrations.trl. Other trainers of TRL run unchanged under "
            "`shoal run`, which restarts them after a fault"
        )


def check_arguments(
    args: Any,
    strategy: str,
    options: Mapping[str, Any],
    *,
    expected: type[TrainingArguments] = TrainingArguments,
) -> None:
    """Raises ConfigurationError for unsupported arguments. `expected`: class of `args`."""
    if not isinstance(args, expected):
        place = expected.__module__.removesuffix(".arguments")
        raise ConfigurationError(
            f"args is a {type(args).__module__}.{type(args).__name__}; expected a "
            f"{place}.{expected.__name__}, which opens no process group of a "
            f"fixed size. Import both classes from {place}"
        )
    if strategy not in STRATEGIES:
        raise ConfigurationError(
            f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}; write your own loop "
            "for the others (docs/migration)"
        )
    for name, (unless_given, instead) in _REFUSED.items():
        value = getattr(args, name, unless_given)
        if value != unless_given and value:
            raise ConfigurationError(
                f"{name}={value!r} is not supported by Shoal's Trainer: {instead}"
            )
    if args.load_best_model_at_end and is_url(args.output_dir):
        raise ConfigurationError(
            f"load_best_model_at_end=True is not supported with the URL {args.output_dir!r}, since "
            "the best checkpoint may not be uploaded at the end of train(); set only "
            "metric_for_best_model, and read it after the run with "
            "shoal.load_full_state(output_dir, best=True)"
        )
    if args.fp16 and args.device.type == "cpu":
        raise ConfigurationError(
            "fp16=True needs a GPU, since transformers silently trains in float32 on a CPU; use "
            "bf16=True, which also works on a CPU"
        )
    if options.get("deterministic") and args.gradient_accumulation_steps < 2:
        raise ConfigurationError(
            "strategy_options deterministic=True is not supported with "
            "gradient_accumulation_steps=1, because a batch is then split by the number of "
            "workers, on which the last digits of the result depend; use smaller batches and "
            "accumulate them, as in per_device_train_batch_size=8, "
            "gradient_accumulation_steps=4"
        )


def order_of(dataset: Any, sampler_fn: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Returns the arguments with which Shoal's loader reads the samples in the order of the
    Trainer's sampler."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not has_length(dataset):
        return {}
    sampler = sampler_fn(dataset) if sampler_fn is not None else None
    if isinstance(sampler, (BatchSampler, BatchRebalanceSampler)):
        raise ConfigurationError(
            f"{type(sampler).__name__} yields whole batches, but Shoal composes the batches "
            "itself; use another train_sampling_strategy"
        )
    if type(sampler) in (RandomSampler, SequentialSampler):
        return {"shuffle": type(sampler) is RandomSampler}
    return {"shuffle": False} if sampler is None else {"sampler": sampler}


def progress_in_epoch(loader: ElasticDataLoader, steps: int, steps_in_epoch: int) -> float:
    """Returns the part of an epoch that the first `steps` of its `steps_in_epoch` steps cover. Like
    transformers, counts batches of `per_device_train_batch_size` samples, because the last step of
    an epoch may have fewer of them."""
    if not has_length(loader):
        return steps / steps_in_epoch
    plan = loader.plan
    batch_size = plan.micro_batch_size or plan.global_batch_size
    done = min(steps * plan.global_batch_size, plan.counted)
    return math.ceil(done / batch_size) / math.ceil(plan.counted / batch_size)


def lengths(args: TrainingArguments, loader: ElasticDataLoader) -> tuple[int, int, int]:
    """Returns the number of steps per epoch, the number of epochs, and the total number of
    steps."""
    if not has_length(loader):
        # transformers has ensured that max_steps is given
        return args.max_steps, sys.maxsize, args.max_steps
    steps = len(loader)
    if args.max_steps > 0:
        return steps, math.ceil(args.max_steps / steps), args.max_steps
    return steps, math.ceil(args.num_train_epochs), math.ceil(args.num_train_epochs * steps)
