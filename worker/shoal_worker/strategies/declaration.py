"""The declaration of a strategy. The declarations (`registry.py`) are the source of all lists of
strategies, in error messages, docs and presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_worker.engine.base import Engine, Setup


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Declaration of one strategy: its name, the function that creates its engine, its costs, and
    the features it supports.

    Costs are in bytes per rank, in Markdown. P, G, O: bytes of parameters, gradients and optimizer
    state; N: number of ranks.
    """

    name: str
    """Name, as passed to `as_distributed(strategy=)`."""
    engine: Callable[[Setup], Engine]
    """Function that creates the engine. Raises ConfigurationError if the strategy's options are
    invalid or conflict with the configuration."""
    memory: str
    """Memory used by a rank."""
    sent: str
    """Bytes sent by a rank per step."""
    a_death: str
    """Cost of a rank's death."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of `as_distributed` that are specific to this strategy."""
    settings: frozenset[str] = frozenset()
    """Fields of `ShardingConfiguration` that this strategy supports but some other strategies do
    not."""
    compressor: str | None = None
    """Compressor suitable for slow links; None if the strategy does not support
    `gradient_compression=`."""
    complex_parameters: bool = False
    """True if the strategy supports complex parameters."""
    communicates_in_passes: bool = False
    """True if all ranks run each pass at the same time, each on its own samples. Layers such as
    SyncBatchNorm, and `shoal.whole_batch`, may then communicate during a pass."""
    keeps_memory: bool = False
    """True if the strategy leaves parameters in the memory that the user's module allocated. Two
    parameters may then share memory."""
    sparse_tables: bool = False
    """True if the strategy supports models with sparse tables."""
    several_models: bool = False
    """True if the strategy supports several models in one loop, each with its own optimizer."""
    why_one_model: str = ""
    """Reason why the strategy does not support several models, and the closest alternative, for the
    error message."""
