"""What a strategy declares of itself. Whatever lists strategies, in errors, docs and presets, asks
the declarations (`registry.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_worker.engine.base import Engine, Setup


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One strategy: a name for an engine and what that is made with.

    Costs are in bytes a rank, in Markdown. P, G, O: those of parameters, gradients and optimizer
    state; N: ranks.
    """

    name: str
    """What `as_distributed(strategy=)` is given."""
    engine: Callable[[Setup], Engine]
    """Makes the engine. Raises ConfigurationError: the strategy's options cannot work, alone or
    with the configuration."""
    memory: str
    """What a rank holds."""
    sent: str
    """What a rank sends in a step."""
    a_death: str
    """What becomes of the work when a rank dies: "a rank that dies ..."."""
    options: frozenset[str] = frozenset()
    """Keyword arguments of `as_distributed` that only this strategy knows."""
    settings: frozenset[str] = frozenset()
    """Fields of `ShardingConfiguration` that not every strategy knows, and this one does."""
    compressor: str | None = None
    """The compressor that suits it over slow links; None: it takes no `gradient_compression=`."""
    complex_parameters: bool = False
    """It trains complex parameters."""
    meets_in_passes: bool = False
    """All ranks pass samples of their own at the same time, so a pass may ask the others:
    SyncBatchNorm layers, `shoal.whole_batch`."""
    keeps_memory: bool = False
    """Parameters stay in the memory in which the user's module has them, so that two of them may
    share it."""
    sparse_tables: bool = False
    """It trains models with sparse tables."""
    several_models: bool = False
    """It trains several models in one loop, each with an optimizer."""
    why_one_model: str = ""
    """Why it does not, and what comes closest, for the error."""
