"""`init_process_group(init_method="redis://host:port/job")`: the rendezvous of a plain torch script
through Redis.

The URL is redis://[user:password@]host:port/job. With TLS it begins with rediss://, and
`?ca=/path/of/ca.pem` names the server's certificate authority if the system does not trust it
already. `?db=2` selects a database. Rank and world size come from the arguments of
init_process_group, or else from the query (`?rank=0&world_size=4`), or else from RANK and
WORLD_SIZE. A job name can be reused: the ranks first agree on a round, which has a prefix of its
own, so they never see leftovers of an earlier run.

`import shoal` registers the init method with torch (torch_extensions.py). For scripts that do not
import shoal, use `python -m shoal_worker.store script.py`.

Shoal's own generations are not formed in this way: the coordinator assigns their ranks and
prefixes. Once a rendezvous is complete, the ranks are not monitored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from shoal_common.errors import ConfigurationError
from shoal_common.redis import redacted, with_authority

from shoal_worker.settings import rank_variables
from shoal_worker.store import scripts
from shoal_worker.store.errors import StoreTimeoutError
from shoal_worker.store.redis_store import DEFAULT_LIFETIME, RedisStore

_REFRESH_S: Final = 1.0
_PATIENCE_S: Final = 5.0
"""Time in seconds after which a waiting rank counts as dead if it has not refreshed its arrival."""

_STORES: Final[list[RedisStore]] = []
"""Stores passed to torch. torch refers only to their C++ half, so this list keeps them alive until
the process exits, like torch's own stores."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Components of a redis:// init method."""

    server: str
    """URL of the server and database."""
    job: str
    rank: int
    world_size: int


def parse(url: str, environment: Mapping[str, str] | None = None) -> Target:
    """Parses an init method. Raises a ConfigurationError that names the missing or invalid part.

    `environment`: environment variables; by default, the variables of this process.
    """
    given = f"init_method {redacted(url)!r}"
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := sorted(set(query) - {"rank", "world_size", "db", "ca"}):
        raise ConfigurationError(
            f"{given}: unknown query parameters {', '.join(unknown)}; expected rank, world_size, "
            "db or ca"
        )
    job = unquote(parts.path.strip("/"))
    if not parts.hostname or not job:
        raise ConfigurationError(
            f"{given}: expected redis://HOST:PORT/JOB, with a job name that no other run uses"
        )
    environment = rank_variables() if environment is None else environment
    rank = _number(given, "rank", 0, query.get("rank"), environment.get("RANK"))
    world_size = _number(
        given, "world_size", 1, query.get("world_size"), environment.get("WORLD_SIZE")
    )
    if rank >= world_size:
        raise ConfigurationError(
            f"{given}: rank={rank} with world_size={world_size}; expected a rank below world_size"
        )
    database = _number(given, "db", 0, query.get("db"), "0")
    server = SplitResult(parts.scheme, parts.netloc, f"/{database}", "", "").geturl()
    authority = Path(query["ca"]) if "ca" in query else None
    if authority is not None and parts.scheme != "rediss":
        raise ConfigurationError(
            f"{given}: ca={query['ca']!r} needs the scheme rediss://, because redis:// has no TLS"
        )
    return Target(
        server=with_authority(server, authority), job=job, rank=rank, world_size=world_size
    )


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[RedisStore, int, int]]:
    """Handler that torch calls for the init method. Yields the store, the rank and the world size
    once all ranks have arrived.

    Raises:
        ConfigurationError: the URL is invalid, or the rank or the world size is missing.
        UnavailableError: there is no server at the URL.
        StoreTimeoutError: ranks did not arrive within `timeout`; the message names them.
    """
    target = parse(url)
    lobby = RedisStore(target.server, f"shoal:{{{target.job}}}:rendezvous", timeout=timeout)
    prefix = _join_round(lobby, target, timeout)
    store = lobby.with_prefix(prefix)
    _STORES.append(store)
    yield store, target.rank, target.world_size
    raise RuntimeError(
        "torch asked for a second rendezvous of the same group, which init_method redis:// does "
        "not support; call init_process_group again"
    )


def _join_round(lobby: RedisStore, target: Target, timeout: timedelta) -> str:
    """Waits for all ranks and returns the prefix of this round's store."""
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    with lobby.watch_writes("round") as written:
        while True:
            written.clear()
            name, absent = _arrive(lobby, target, token)
            if not absent:
                return f"shoal:{{{target.job}}}:group:{name}"
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise StoreTimeoutError(
                    f"job {target.job!r}: rank {target.rank} waited {timeout.total_seconds():g} s "
                    f"for {', '.join(absent)} of world_size={target.world_size} to arrive"
                )
            written.wait(min(remaining, _REFRESH_S))


def _arrive(lobby: RedisStore, target: Target, token: str) -> tuple[str, list[str]]:
    """Registers or refreshes this rank's arrival. Returns the round's name and the absent ranks. If
    no rank is absent, the round is complete."""
    patience_ms, lifetime_s = int(_PATIENCE_S * 1000), int(DEFAULT_LIFETIME.total_seconds())
    new_name = uuid.uuid4().hex[:12]
    reply = lobby.run_script(
        scripts.ARRIVE, target.world_size, target.rank, token, patience_ms, new_name, lifetime_s
    )
    name, *absent = [part.decode() for part in reply]
    return name, absent


def _number(
    given: str, field: str, least: int, argument: str | None, environment: str | None
) -> int:
    """Returns an integer that was passed to `init_process_group` or, if it was not, is in the
    environment.

    Args:
        given: the init method, for errors.
        field: name of the value.
        least: smallest valid value.
        argument: the value in the query, where torch puts the argument of `init_process_group`;
            "-1" or None if there was none.
        environment: the value in the environment; None if there is none.
    """
    text = argument if argument is not None and argument != "-1" else environment
    if text is None:
        raise ConfigurationError(
            f"{given}: no {field} was set; pass {field}= to init_process_group, put it in the "
            f"query, or set {field.upper()}"
        )
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"{given}: {field}={text!r}; expected an integer of {least} or more"
        )
    return int(text)
