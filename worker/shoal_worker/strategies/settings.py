"""Settings that not every strategy knows: one that a strategy does not know is refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from shoal_common.errors import ConfigurationError

from shoal_worker.config import ShardingConfiguration

_INSTEAD: Final = {
    "param_dtype": "compute within torch.autocast, or take zero1, zero2, zero3, fsdp or hsdp",
    "reduce_dtype": 'use gradient_compression="bf16", or take zero1, zero2, zero3, fsdp or hsdp',
    "offload": "take zero1, zero2, zero3, fsdp or hsdp, whose optimizer state is in shards",
    "shard_modules": "take zero3, fsdp or hsdp, which gather parameters by modules, or leave it out",
}


def check_settings(strategy: str, known: AbstractSet[str], config: ShardingConfiguration) -> None:
    """`known`: the settings among these that `strategy` knows.

    Raises:
        ConfigurationError: `config` has another one.
    """
    for name, instead in _INSTEAD.items():
        if getattr(config, name) is not None and name not in known:
            raise ConfigurationError(f"{name}={getattr(config, name)!r} with strategy={strategy!r}, which does not know it: {instead}")
