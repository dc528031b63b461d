"""The declaration of a strategy. Code that lists strategies, in errors, docs and presets, uses the
declarations (`registry.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_worker.engine.base import Engine, Setup


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One strategy: a name for an engine and its arguments.

    Costs are in bytes per rank, in Markdown. P, G, O: bytes of parameters, gradients and optimizer
    state; N: number of ranks.
    """

    name: str
    """Value of `as_distributed(strategy=)`."""
    engine: Callable[[Setup], Engine]
    """Creates the engine. Raises ConfigurationError if the strategy's options are invalid, alone or
    with the configuration."""
    memory: str
    """Memory of a rank."""
    sent: str
    """Traffic of a rank in a step."""
    a_death: str
    """Effect of a rank's death."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of `as_distributed` specific to this strategy."""
    settings: frozenset[str] = frozenset()
    """Fields of `ShardingConfiguration` that this strategy supports, but not every one does."""
    compressor: str | None = None
    """Suitable compressor for slow links; None: no support for `gradient_compression=`."""
    complex_parameters: bool = False
    """True if it supports complex parameters."""
    communicates_in_passes: bool = False
    """True if all ranks pass samples of their own at the same time, so that a pass may communicate
    with the others: SyncBatchNorm layers, `shoal.whole_batch`."""
    keeps_memory: bool = False
    """Parameters stay in the memory in which the user's module has them, so that two of them may
    share it."""
    sparse_tables: bool = False
    """True if it supports models with sparse tables."""
    several_models: bool = False
    """True if it supports several models in one loop, each with an optimizer."""
    why_one_model: str = ""
    """Reason for not supporting them, and the closest alternative, for the error."""
