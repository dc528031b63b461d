"""The meaning of init_method="redis://..." URLs and the errors for wrong ones."""

from __future__ import annotations

import pytest
from shoal_common.errors import ConfigurationError
from shoal_worker.store.rendezvous import parse


def test_rank_and_world_size_come_from_the_query_written_by_torch() -> None:
    target = parse("redis://10.0.0.7:6380/mnist?rank=2&world_size=4", {})
    assert (target.server, target.job, target.rank, target.world_size) == (
        "redis://10.0.0.7:6380/0",
        "mnist",
        2,
        4,
    )


def test_environment_fills_in_values_missing_from_the_query() -> None:
    target = parse("redis://h:1/job?rank=1", {"RANK": "0", "WORLD_SIZE": "3"})
    assert (target.rank, target.world_size) == (1, 3)


def test_minus_one_means_unset_as_in_torch() -> None:
    target = parse("redis://h:1/job?rank=-1&world_size=-1", {"RANK": "2", "WORLD_SIZE": "3"})
    assert (target.rank, target.world_size) == (2, 3)


def test_credentials_tls_and_database_reach_the_server_url() -> None:
    target = parse("rediss://alice:s%40crt@h:6379/team%2Fjob?db=2&rank=0&world_size=1", {})
    assert target.server == "rediss://alice:s%40crt@h:6379/2"
    assert target.job == "team/job"


@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        ("redis://h:1", {"RANK": "0", "WORLD_SIZE": "1"}, "redis://HOST:PORT/JOB"),
        ("redis:///job", {"RANK": "0", "WORLD_SIZE": "1"}, "redis://HOST:PORT/JOB"),
        ("redis://h:1/job", {"WORLD_SIZE": "1"}, "no rank was set; pass rank="),
        ("redis://h:1/job", {"RANK": "0"}, "set WORLD_SIZE"),
        ("redis://h:1/job?rank=one&world_size=2", {}, "rank='one'"),
        ("redis://h:1/job?rank=0&world_size=0", {}, "expected an integer of 1 or more"),
        ("redis://h:1/job?rank=2&world_size=2", {}, "expected a rank below world_size"),
        ("redis://h:1/job?rank=0&wordl_size=2", {}, "unknown query parameters wordl_size"),
        ("redis://h:1/job?rank=0&world_size=1&db=two", {}, "db='two'"),
        ("redis://h:1/job?rank=0&world_size=1&ca=/ca.pem", {}, "needs the scheme rediss://"),
        (
            "redis://[::1/job?rank=0&world_size=1",
            {},
            "cannot parse the Redis URL: Invalid IPv6 URL",
        ),
    ],
)
def test_unusable_url_is_refused_with_its_remedy(
    url: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(url, environment)


def test_the_password_is_never_repeated_in_an_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("redis://alice:hunter2@h:1/job", {})
    assert "hunter2" not in str(caught.value)
