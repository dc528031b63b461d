"""The collectives of a step in the order in which this rank issued them, to find ranks that issued others.

Ranks that gather blocks in different orders pair up wrongly. With blocks of one size nothing fails: each takes another block's values for
its own. So a check word rides in the closing of each step. Where sizes differ a collective fails, and the step is lost before its closing:
then the ranks compare what they issued when they next meet. Used by the thread that issues collectives.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Final

from shoal_common.errors import PreconditionError

from shoal_worker.elastic.place import agree

_CHECK_BITS: Final = 20
"""So that the squares' sum over up to 8192 ranks is exact in float64."""


class IssuedCollectives:
    """The collectives that one rank has issued in one step."""

    def __init__(self) -> None:
        self._step = 0
        self._codes: list[int] = []
        self._check = 0

    def begin(self, step: int) -> None:
        """Step number `step` of this model begins."""
        self._step, self._check = step, 0
        self._codes.clear()

    def add(self, kind: str, unit: int) -> None:
        """A collective was issued for unit number `unit`."""
        code = 2 * unit + (kind == "reduce")
        self._codes.append(code)
        self._check = zlib.crc32(code.to_bytes(4, "little"), self._check)

    def word(self) -> list[float]:
        """What this rank adds to the check word."""
        value = float(self._check & ((1 << _CHECK_BITS) - 1))
        return [1.0, value, value * value]

    def encode(self) -> bytes:
        """For `compare` on the other ranks."""
        return json.dumps([self._step, *self._codes]).encode() if self._codes else b""

    @staticmethod
    def check(summed: Sequence[float], strategy: str) -> None:
        """`summed`: the ranks' words.

        Raises:
            PreconditionError: they issued different collectives.
        """
        if not agree(summed):
            raise _different(strategy)

    @staticmethod
    def compare(told: Sequence[bytes], strategy: str) -> None:
        """After a failure. `told`: what the ranks say. Those that were in one step issued the same up to where each came to its end.

        Raises:
            PreconditionError: they did not.
        """
        steps: dict[int, list[list[int]]] = {}
        for each in filter(None, told):
            step, *codes = json.loads(each)
            steps.setdefault(step, []).append(codes)
        for logs in steps.values():
            longest = max(logs, key=len)
            if any(codes != longest[: len(codes)] for codes in logs):
                raise _different(strategy)


def _different(strategy: str) -> PreconditionError:
    return PreconditionError(
        "the ranks gathered the model's blocks in different orders, so that blocks were mixed up, and the step cannot count: with "
        f"strategy={strategy!r} every rank's passes must go through the same blocks in the same order, leaving out none. Choose larger "
        "blocks (shard_modules=), inside which ranks may differ, or use zero2, which gathers nothing in a pass",
        reason="RANKS_DIVERGED",
    )
