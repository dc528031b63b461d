"""The declaration of a strategy. Code that lists strategies, as in errors, docs and presets, reads
the declarations (`registry.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_worker.engine.base import Engine, Setup


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Declaration of one strategy: a name for an engine with its arguments, and the strategy's
    costs.

    Costs are in bytes per rank, in Markdown. P, G, O: bytes of parameters, gradients and optimizer
    state; N: number of ranks.
    """

    name: str
    """Value of `as_distributed(strategy=)`."""
    engine: Callable[[Setup], Engine]
    """Creates the engine. Raises ConfigurationError if the strategy's options are invalid, alone or
    with the configuration."""
    memory: str
    """Memory used by a rank."""
    sent: str
    """Bytes sent by a rank per step."""
    a_death: str
    """Effect of a rank's death."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of `as_distributed` specific to this strategy."""
    settings: frozenset[str] = frozenset()
    """Fields of `ShardingConfiguration` that this strategy supports, among those that not every
    strategy supports."""
    compressor: str | None = None
    """Compressor suitable for slow links; None if the strategy does not support
    `gradient_compression=`."""
    complex_parameters: bool = False
    """True if the strategy supports complex parameters."""
    communicates_in_passes: bool = False
    """True if all ranks pass their own samples at the same time, so that a pass may communicate
    with other ranks: SyncBatchNorm layers, `shoal.whole_batch`."""
    keeps_memory: bool = False
    """True if parameters stay in the memory in which the user's module has them, so that two
    parameters may share memory."""
    sparse_tables: bool = False
    """True if the strategy supports models with sparse tables."""
    several_models: bool = False
    """True if the strategy supports several models in one loop, each with an optimizer."""
    why_one_model: str = ""
    """Reason why the strategy does not support several models, and the closest alternative, for the
    error."""
