"""The names that the specification requires, in Python spelling. Each exists and has its required
methods."""

from __future__ import annotations

import inspect

import pytest
import shoal
from shoal_worker.compression.registry import compressor_names
from shoal_worker.strategies import registry as strategies

MODELS = [
    "DDP",
    "FSDP",
    "HSDP",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "PipelineParallel",
    "TensorParallel",
    "HybridSharded",
    "LocalSGD",
    "AsyncSGD",
]
OPTIMIZERS = ["DDP", "FSDP", "ZeRO1", "ZeRO2", "ZeRO3", "AsyncSGD", "LocalSGD", "Elastic"]
MODEL_METHODS = [
    "initialize_sharding",
    "on_before_initialize_sharding",
    "train_step",
    "predict",
    "synchronize_gradients",
    "get_gradients",
    "set_gradients",
    "gather_full_parameters",
    "full_state_dict",
    "local_shard",
    "with_parameters",
    "clone",
    "serialize",
    "deserialize",
    "save_model",
    "load_model",
    "get_model_metadata",
    "clip_grad_norm_",
    "data_parallel_rank",
    "data_parallel_size",
]
OPTIMIZER_METHODS = [
    "step",
    "zero_grad",
    "optimize",
    "synchronize_parameters",
    "synchronize_optimizer_state",
    "should_early_stop",
    "serialize",
    "deserialize",
    "state_dict",
    "load_state_dict",
]
BACKEND_METHODS = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "rank",
    "world_size",
    "is_initialized",
    "initialize",
    "shutdown",
]
API = [
    "init",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "register_state",
    "ElasticDataLoader",
    "evaluate",
    "save_checkpoint",
    "resume",
    "load_full_state",
    "is_joining",
    "launch",
    "device",
    "StepStatus",
    "SparseEmbedding",
    "SparseEmbeddingBag",
    "OptimizationInputData",
    "OptimizationResult",
]


def has(kind: type, *names: str) -> None:
    lacking = [name for name in names if not hasattr(kind, name)]
    assert lacking == [], kind
    silent = [name for name in names if not inspect.getdoc(getattr(kind, name))]
    assert silent == [], kind


def test_models_exist_with_their_methods(subtests: pytest.Subtests) -> None:
    for name in MODELS:
        with subtests.test(name):
            kind = getattr(shoal, f"{name}Model")
            assert issubclass(kind, shoal.ShardedModel)
            assert not inspect.isabstract(kind)
            has(kind, *MODEL_METHODS)


def test_optimizers_exist_with_their_methods(subtests: pytest.Subtests) -> None:
    for name in OPTIMIZERS:
        with subtests.test(name):
            kind = getattr(shoal, f"{name}Optimizer")
            assert issubclass(kind, shoal.ShardedOptimizer)
            has(kind, *OPTIMIZER_METHODS)


def test_every_strategys_optimizer_adapts_to_other_ranks_and_reports_them() -> None:
    for name in strategies.names():
        _, kind = strategies.find(name)
        assert issubclass(kind, shoal.ElasticOptimizer), name
        has(kind, "on_membership_change", "membership")


def test_every_strategys_classes_are_public() -> None:
    for name in strategies.names():
        for kind in strategies.find(name):
            assert getattr(shoal, kind.__name__) is kind


def test_backends_exist_with_their_methods(subtests: pytest.Subtests) -> None:
    for name in ("InMemory", "MPI", "NCCL", "Gloo"):
        with subtests.test(name):
            kind = getattr(shoal, f"{name}Backend")
            assert issubclass(kind, shoal.CommunicationBackend)
            has(kind, *BACKEND_METHODS)


def test_compressors_exist() -> None:
    has(shoal.GradientCompressor, "compress", "decompress")
    has(shoal.GradientCompressionOptimizer, "step", "zero_grad")
    assert {"fp16", "bf16", "int8", "topk", "randomk", "sign", "powersgd"} <= set(
        compressor_names()
    )


def test_the_configuration_has_its_presets() -> None:
    has(shoal.ShardingConfiguration, "for_high_bandwidth", "for_low_bandwidth", "for_offload")
    fields = shoal.ShardingConfiguration.__dataclass_fields__
    assert {
        "auto_sync_gradients",
        "minimum_parameter_group_size",
        "gradient_compression",
        "offload",
        "param_dtype",
    } <= fields.keys()
    assert {
        "reduce_dtype",
        "shard_modules",
        "activation_checkpointing",
        "deterministic",
    } <= fields.keys()


def test_api_exists() -> None:
    assert [name for name in API if not inspect.getdoc(getattr(shoal, name, None))] == []
