"""Elastic distributed training for PyTorch: `import shoal` is the entire public API.

Everything except the errors is imported on first use (PEP 562). Code that does not need torch, such
as the command line and the launcher in this package, therefore does not wait until torch is
imported. Type checkers and editors read the imports below; the interpreter reads `_HOMES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LimitError,
    MembershipChanged,
    PermissionDeniedError,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_worker import torch_extensions as _torch_extensions

if TYPE_CHECKING:
    from shoal_common.clients.coordinator import CoordinatorClient
    from shoal_common.rpc.channel import ChannelSettings
    from shoal_common.security.authentication import TlsSettings
    from shoal_worker.api import (
        ElasticDataLoader,
        MLflow,
        OpenTelemetry,
        ShardedModel,
        ShardedOptimizer,
        ShardedStream,
        ShardingConfiguration,
        StepStatus,
        TensorBoard,
        WandB,
        all_reduce,
        as_distributed,
        as_distributed_for_high_bandwidth,
        as_distributed_for_low_bandwidth,
        barrier,
        broadcast,
        device,
        evaluate,
        gather,
        generation,
        init,
        is_joining,
        is_main_process,
        load_full_state,
        main_first,
        print_once,
        process_group,
        rank,
        register_state,
        report,
        resume,
        save_checkpoint,
        shutdown,
        track,
        whole_batch,
        world_size,
    )
    from shoal_worker.backends.base import CommunicationBackend
    from shoal_worker.backends.gloo.backend import GlooBackend
    from shoal_worker.backends.inmemory.backend import InMemoryBackend
    from shoal_worker.backends.mpi.backend import MPIBackend
    from shoal_worker.backends.nccl.backend import NCCLBackend
    from shoal_worker.compression.base import GradientCompressor
    from shoal_worker.compression.compressing_optimizer import GradientCompressionOptimizer
    from shoal_worker.launch import launch
    from shoal_worker.planning.plan import Plan, PlannedStrategy
    from shoal_worker.planning.planner import plan
    from shoal_worker.sparse_tables.embedding import SparseEmbedding, SparseEmbeddingBag
    from shoal_worker.strategies.async_sgd import AsyncSGDModel, AsyncSGDOptimizer
    from shoal_worker.strategies.ddp import DDPModel, DDPOptimizer
    from shoal_worker.strategies.fitting import (
        EpochRecord,
        OptimizationInputData,
        OptimizationResult,
    )
    from shoal_worker.strategies.hybrid import HybridShardedModel, HybridShardedOptimizer
    from shoal_worker.strategies.local_sgd import LocalSGDModel, LocalSGDOptimizer
    from shoal_worker.strategies.optimizer import ElasticOptimizer
    from shoal_worker.strategies.pipeline import PipelineParallelModel, PipelineParallelOptimizer
    from shoal_worker.strategies.sharded import (
        FSDPModel,
        FSDPOptimizer,
        HSDPModel,
        HSDPOptimizer,
        ZeRO1Model,
        ZeRO1Optimizer,
        ZeRO2Model,
        ZeRO2Optimizer,
        ZeRO3Model,
        ZeRO3Optimizer,
    )
    from shoal_worker.strategies.tensor import TensorParallelModel, TensorParallelOptimizer

    from shoal import optim as optim
    from shoal import ray as ray
    from shoal.client import AsyncClient, Client
    from shoal.parameter_servers import ModelReader, ParameterServerClient

__all__ = [
    "AsyncClient",
    "AsyncSGDModel",
    "AsyncSGDOptimizer",
    "AuthenticationError",
    "ChannelSettings",
    "Client",
    "CommunicationBackend",
    "ConfigurationError",
    "CoordinatorClient",
    "CorruptDataError",
    "DDPModel",
    "DDPOptimizer",
    "DeadlineError",
    "ElasticDataLoader",
    "ElasticOptimizer",
    "EpochRecord",
    "FSDPModel",
    "FSDPOptimizer",
    "GlooBackend",
    "GradientCompressionOptimizer",
    "GradientCompressor",
    "HSDPModel",
    "HSDPOptimizer",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "InMemoryBackend",
    "InternalError",
    "InvalidRequestError",
    "LimitError",
    "LocalSGDModel",
    "LocalSGDOptimizer",
    "MLflow",
    "OpenTelemetry",
    "MPIBackend",
    "MembershipChanged",
    "ModelReader",
    "NCCLBackend",
    "OptimizationInputData",
    "OptimizationResult",
    "ParameterServerClient",
    "PermissionDeniedError",
    "Plan",
    "PlannedStrategy",
    "PipelineParallelModel",
    "PipelineParallelOptimizer",
    "PreconditionError",
    "ShardedModel",
    "ShardedOptimizer",
    "ShardedStream",
    "ShardingConfiguration",
    "ShoalError",
    "SparseEmbedding",
    "SparseEmbeddingBag",
    "StaleGenerationError",
    "StepStatus",
    "TensorBoard",
    "WandB",
    "TensorParallelModel",
    "TensorParallelOptimizer",
    "TlsSettings",
    "UnavailableError",
    "UnknownResourceError",
    "ZeRO1Model",
    "ZeRO1Optimizer",
    "ZeRO2Model",
    "ZeRO2Optimizer",
    "ZeRO3Model",
    "ZeRO3Optimizer",
    "all_reduce",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "barrier",
    "broadcast",
    "device",
    "evaluate",
    "gather",
    "generation",
    "init",
    "is_joining",
    "is_main_process",
    "launch",
    "load_full_state",
    "main_first",
    "plan",
    "print_once",
    "process_group",
    "rank",
    "register_state",
    "report",
    "resume",
    "save_checkpoint",
    "shutdown",
    "track",
    "whole_batch",
    "world_size",
]

_API = "shoal_worker.api"
_HOMES = {
    "AsyncClient": "shoal.client",
    "AsyncSGDModel": "shoal_worker.strategies.async_sgd",
    "AsyncSGDOptimizer": "shoal_worker.strategies.async_sgd",
    "ChannelSettings": "shoal_common.rpc.channel",
    "Client": "shoal.client",
    "CommunicationBackend": "shoal_worker.backends.base",
    "CoordinatorClient": "shoal_common.clients.coordinator",
    "DDPModel": "shoal_worker.strategies.ddp",
    "DDPOptimizer": "shoal_worker.strategies.ddp",
    "ElasticOptimizer": "shoal_worker.strategies.optimizer",
    "EpochRecord": "shoal_worker.strategies.fitting",
    "FSDPModel": "shoal_worker.strategies.sharded",
    "FSDPOptimizer": "shoal_worker.strategies.sharded",
    "GlooBackend": "shoal_worker.backends.gloo.backend",
    "GradientCompressionOptimizer": "shoal_worker.compression.compressing_optimizer",
    "GradientCompressor": "shoal_worker.compression.base",
    "HSDPModel": "shoal_worker.strategies.sharded",
    "HSDPOptimizer": "shoal_worker.strategies.sharded",
    "HybridShardedModel": "shoal_worker.strategies.hybrid",
    "HybridShardedOptimizer": "shoal_worker.strategies.hybrid",
    "InMemoryBackend": "shoal_worker.backends.inmemory.backend",
    "MLflow": "shoal_worker.tracking.mlflow",
    "LocalSGDModel": "shoal_worker.strategies.local_sgd",
    "LocalSGDOptimizer": "shoal_worker.strategies.local_sgd",
    "MPIBackend": "shoal_worker.backends.mpi.backend",
    "NCCLBackend": "shoal_worker.backends.nccl.backend",
    "ModelReader": "shoal.parameter_servers",
    "OpenTelemetry": "shoal_worker.tracking.opentelemetry",
    "OptimizationInputData": "shoal_worker.strategies.fitting",
    "OptimizationResult": "shoal_worker.strategies.fitting",
    "ParameterServerClient": "shoal.parameter_servers",
    "Plan": "shoal_worker.planning.plan",
    "PlannedStrategy": "shoal_worker.planning.plan",
    "PipelineParallelModel": "shoal_worker.strategies.pipeline",
    "PipelineParallelOptimizer": "shoal_worker.strategies.pipeline",
    "SparseEmbedding": "shoal_worker.sparse_tables.embedding",
    "SparseEmbeddingBag": "shoal_worker.sparse_tables.embedding",
    "TensorParallelModel": "shoal_worker.strategies.tensor",
    "TensorParallelOptimizer": "shoal_worker.strategies.tensor",
    "TensorBoard": "shoal_worker.tracking.tensorboard",
    "TlsSettings": "shoal_common.security.authentication",
    "WandB": "shoal_worker.tracking.wandb",
    "ZeRO1Model": "shoal_worker.strategies.sharded",
    "ZeRO1Optimizer": "shoal_worker.strategies.sharded",
    "ZeRO2Model": "shoal_worker.strategies.sharded",
    "ZeRO2Optimizer": "shoal_worker.strategies.sharded",
    "ZeRO3Model": "shoal_worker.strategies.sharded",
    "ZeRO3Optimizer": "shoal_worker.strategies.sharded",
    "launch": "shoal_worker.launch",
    "plan": "shoal_worker.planning.planner",
}
"""Public name -> module that defines it. Names that are not listed are defined in the API
module."""

# enables init_process_group("shoal_gloo") and init_process_group(init_method="redis://...")
_torch_extensions.register()


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("shoal")
    if name in ("optim", "ray"):
        return import_module(f"shoal.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, _API)), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "optim", "ray"})
