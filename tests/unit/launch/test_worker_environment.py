"""The environment variables that worker processes get."""

from __future__ import annotations

from pathlib import Path

from shoal.launcher.workers.environment import (
    NodePlacement,
    WorkerPlacement,
    inherited,
    interface_variables,
    metrics_listen,
    slice_variables,
    torchrun_variables,
)


def test_ranks_follow_the_node_and_the_index() -> None:
    node = NodePlacement(node_rank=1, node_count=3, master_address="10.0.0.1", master_port=1234)
    variables = torchrun_variables(
        WorkerPlacement(index=1, workers=4, node=node),
        run_id="job",
        role="trainer",
        restarts=2,
        max_restarts=5,
        error_file=Path("/e.json"),
    )
    assert variables == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/e.json",
    }


def test_several_workers_get_one_thread_each_unless_set_otherwise() -> None:
    assert inherited({}, workers=2, local=True)["OMP_NUM_THREADS"] == "1"
    assert inherited({"OMP_NUM_THREADS": "4"}, workers=2, local=True)["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in inherited({}, workers=1, local=True)


def test_launchers_own_cluster_does_not_receive_credentials_for_another() -> None:
    given = {"SHOAL_TOKEN": "secret", "SHOAL_TLS_CA": "/ca.pem", "PATH": "/bin"}
    assert not {"SHOAL_TOKEN", "SHOAL_TLS_CA"} & set(inherited(given, workers=1, local=True))
    assert inherited(given, workers=1, local=False)["SHOAL_TOKEN"] == "secret"


def test_launchers_own_cluster_does_not_receive_public_addresses() -> None:
    given = {"SHOAL_LOCAL_ADDR": "eth1", "SHOAL_LISTEN_ADDR": "0.0.0.0"}
    assert not set(given) & set(inherited(given, workers=1, local=True))
    assert given.items() <= inherited(given, workers=1, local=False).items()


def test_torch_is_given_the_interface_unless_another_is_set() -> None:
    assert interface_variables({}, "eth1") == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert interface_variables({"GLOO_SOCKET_IFNAME": "eth0"}, "eth1") == {
        "NCCL_SOCKET_IFNAME": "=eth1"
    }
    assert interface_variables({}, None) == {}


def test_each_worker_sees_one_of_the_launchers_slices() -> None:
    slices = {"CUDA_VISIBLE_DEVICES": "MIG-aa, MIG-bb"}
    assert [slice_variables(slices, index=index)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == [
        "MIG-aa",
        "MIG-bb",
        "MIG-aa",
    ]
    for others in (
        {},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "MIG-aa,GPU-bb"},
    ):
        assert slice_variables(others, index=1) == {}


def test_metrics_ports_do_not_collide() -> None:
    assert metrics_listen({}, index=3, enabled=True) == "127.0.0.1:0"
    assert (
        metrics_listen({"SHOAL_METRICS_LISTEN": "0.0.0.0:9100"}, index=3, enabled=True)
        == "0.0.0.0:9103"
    )
    assert metrics_listen({"SHOAL_METRICS_LISTEN": "[::]:0"}, index=3, enabled=True) == "[::]:0"
    assert metrics_listen({"SHOAL_METRICS_LISTEN": "0.0.0.0:9100"}, index=3, enabled=False) is None
