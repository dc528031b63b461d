"""Compressors by name. To add a compressor, define a class and add a line to the table in this
module. A compressor's module is imported when the compressor is first used.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Final

from shoal_common.errors import ConfigurationError

from shoal_worker.compression.base import GradientCompressor

_COMPRESSORS: Final = {
    "fp16": "shoal_worker.compression.quantized:Float16Compressor",
    "bf16": "shoal_worker.compression.quantized:BFloat16Compressor",
    "int8": "shoal_worker.compression.quantized:Int8Compressor",
    "topk": "shoal_worker.compression.sparse:TopKCompressor",
    "randomk": "shoal_worker.compression.sparse:RandomKCompressor",
    "sign": "shoal_worker.compression.sign:SignCompressor",
    "powersgd": "shoal_worker.compression.powersgd:PowerSGDCompressor",
}


def compressor_names() -> tuple[str, ...]:
    """Returns the names accepted by `gradient_compression=`."""
    return tuple(_COMPRESSORS)


def compressor_class(name: str) -> type[GradientCompressor]:
    """Returns the compressor class with this name.

    Raises:
        ConfigurationError: there is no such compressor.
    """
    if not isinstance(name, str) or name not in _COMPRESSORS:
        raise ConfigurationError(
            f"gradient_compression={name!r}: expected one of {', '.join(_COMPRESSORS)}"
        )
    module, _, attribute = _COMPRESSORS[name].partition(":")
    found: type[GradientCompressor] = getattr(importlib.import_module(module), attribute)
    return found


def parse_compression(
    value: str | Mapping[str, Any] | GradientCompressor | None,
) -> GradientCompressor | None:
    """Returns the compressor for a value of `gradient_compression=`: a name ("topk"), a name with
    settings ({"name": "topk", "ratio": 0.001}), a compressor, or None.

    Raises:
        ConfigurationError: an unknown name or setting, or an invalid value.
    """
    if value is None or isinstance(value, GradientCompressor):
        return value
    if not isinstance(value, (str, Mapping)):
        raise ConfigurationError(
            f"gradient_compression={value!r}: expected a name, a name with settings such as "
            '{"name": "topk", "ratio": 0.001}, or a GradientCompressor'
        )
    settings: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
    name = settings.pop("name", None)
    found = compressor_class(name)
    known = sorted(field.name for field in dataclasses.fields(found))
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigurationError(
            f"gradient_compression={name!r} has no settings {unknown}; its settings are: "
            f"{', '.join(known)}"
        )
    return found(**settings)
