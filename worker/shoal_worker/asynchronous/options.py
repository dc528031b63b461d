"""What `as_distributed(..., strategy="async_sgd", ...)` takes beside the settings common to all strategies. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal_common.errors import ConfigurationError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.backends.registry import backend_names
from shoal_worker.config import ShardingConfiguration


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """Options of async_sgd.

    Raises:
        ConfigurationError: a value that cannot work, or two that contradict each other.
    """

    consistency: str = "asp"
    """"asp": nobody waits. "ssp": a worker more than `staleness_bound` iterations ahead of the slowest one waits at the end of its step."""
    staleness_bound: int | None = None
    """ssp only, and needed there: iterations, >= 0."""
    pull_every: int = 1
    """Pull new values in every n-th step only; >= 1. Saves half of the bytes at most, for gradients of older values."""
    server_timeout: timedelta = timedelta(minutes=5)
    """Longest a parameter server may be away (it restarts, say) before `optimizer.step()` gives up."""

    def __post_init__(self) -> None:
        if self.consistency not in ("asp", "ssp"):
            remedy = '; for a step that all workers take together use strategy="ddp"' if self.consistency == "bsp" else ""
            raise ConfigurationError(f'consistency={self.consistency!r}: expected "asp" or "ssp"{remedy}')
        if self.consistency == "ssp" and self.staleness_bound is None:
            raise ConfigurationError(
                'consistency="ssp" needs staleness_bound=: how many iterations a worker may be ahead of the slowest; 3, say'
            )
        if self.consistency == "asp" and self.staleness_bound is not None:
            raise ConfigurationError(
                f'staleness_bound={self.staleness_bound} with consistency="asp", where nobody waits; give consistency="ssp", or no bound'
            )
        if self.staleness_bound is not None and (type(self.staleness_bound) is not int or not 0 <= self.staleness_bound < 2**31):
            raise ConfigurationError(f"staleness_bound={self.staleness_bound!r}: expected a whole number of iterations, 0 or more")
        if type(self.pull_every) is not int or self.pull_every < 1:
            raise ConfigurationError(f"pull_every={self.pull_every!r}: expected a whole number of steps, at least 1")
        if self.consistency == "ssp" and self.pull_every > 1:
            raise ConfigurationError(
                f'pull_every={self.pull_every} with consistency="ssp": the bound is kept by waiting at pulls; use pull_every=1, or "asp"'
            )
        if not isinstance(self.server_timeout, timedelta) or self.server_timeout <= timedelta(0):
            raise ConfigurationError(f"server_timeout={self.server_timeout!r}: expected a positive timedelta")

    @property
    def waits_for_others(self) -> bool:
        """ssp."""
        return self.consistency == "ssp"

    def message(self) -> pb.Consistency:
        """For ConfigureOptimizer."""
        if self.waits_for_others:
            return pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=self.staleness_bound)
        return pb.Consistency(mode=pb.Consistency.MODE_ASP)


def check_configuration(config: ShardingConfiguration, backend: str) -> None:
    """Refuses settings that mean nothing without a common step.

    Raises:
        ConfigurationError: one of them, and what to do.
    """
    if backend not in backend_names():
        # async_sgd has no process group, so that any known one will do; a misspelled one would be an error with other strategies.
        raise ConfigurationError(f"backend={backend!r}: expected one of {', '.join(backend_names())}")
    if config.compressor is not None and not config.compressor.codec:
        raise ConfigurationError(
            f'gradient_compression={config.compressor.name!r} with strategy="async_sgd": it needs sums over all ranks, and a parameter '
            "server sees one worker's push; take topk, int8 or another"
        )
    if config.deterministic:
        raise ConfigurationError(
            'deterministic=True with strategy="async_sgd": pushes are applied in the order in which they come; use "ddp" for results that '
            "repeat"
        )
