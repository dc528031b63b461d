"""The address of a worker's metrics that is announced to Prometheus: never an address at which they
are not served."""

from __future__ import annotations

import pytest
from shoal_common.system.own_address import OwnAddress
from shoal_worker.elastic.session.worker_process import metrics_address

OWN = OwnAddress(announced="10.0.0.1", bound="10.0.0.1")
ALONE = OwnAddress(announced="127.0.0.1", bound="127.0.0.1")


@pytest.mark.parametrize(
    ("listen", "own", "expected"),
    [
        ("0.0.0.0:0", OWN, "10.0.0.1:9100"),
        ("[::]:0", OWN, "10.0.0.1:9100"),
        ("10.0.0.2:0", OWN, "10.0.0.2:9100"),
        ("127.0.0.1:0", ALONE, "127.0.0.1:9100"),
        ("127.0.0.1:0", OWN, ""),
        ("localhost:0", OWN, ""),
        ("[::1]:0", OWN, ""),
        ("[fd00::1]:0", OWN, "[fd00::1]:9100"),
    ],
)
def test_metrics_address_is_the_serving_one_or_empty(
    listen: str, own: OwnAddress, expected: str
) -> None:
    assert metrics_address(listen, 9100, own) == expected
