"""One rank that runs all cases (ddp_cases/), each in its own job on the coordinator at
SHOAL_COORDINATOR. Writes the outcome of each case to OUTPUT as JSON; see test_ddp_parity.py."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import torch
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.session.worker_process import current_session, open_session, set_session
from shoal_worker.settings import WorkerSettings

# they name their cases
from tests.integration.worker_elastic.ddp_cases import computing, gradients, optimizing, outputs  # noqa: F401
from tests.integration.worker_elastic.ddp_cases.case import (
    CASES,
    TOLERANCE,
    WORLD,
    Alone,
    Ranks,
    State,
)

__all__ = ["CASES", "WORLD"]


def difference(expected: State, got: State) -> str:
    """Describes the tensors that differ by more than the tolerance; empty if none does."""
    exact = all(tensor.dtype != torch.float32 for tensor in expected.values())
    tolerance = TOLERANCE if exact else 1e-6
    wrong = []
    for name in sorted(expected.keys() | got.keys()):
        if name not in got or name not in expected:
            wrong.append(f"{name} is missing")
        elif expected[name].shape != got[name].shape:
            wrong.append(
                f"{name} has shape {tuple(got[name].shape)} instead of "
                f"{tuple(expected[name].shape)}"
            )
        elif not torch.allclose(expected[name], got[name], rtol=0, atol=tolerance):
            wrong.append(
                f"{name} is off by "
                f"{float((expected[name].double() - got[name].double()).abs().max()):.2g}"
            )
    return "; ".join(wrong)


def outcome(name: str) -> str:
    """Runs one case; returns a description of the difference from one process, empty if there is
    none."""
    run = CASES[name]
    try:
        torch.manual_seed(0)
        expected = run(Alone())
        open_session(WorkerSettings(job_id=f"job-{list(CASES).index(name)}"))
        try:
            torch.manual_seed(0)
            return difference(expected, run(Ranks()))
        finally:
            current_session().close()
            set_session(None)
    except Exception as error:  # any error is the outcome of the case
        return f"{type(error).__name__}: {error}"


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    # warned by SequentialLR itself
    warnings.filterwarnings(
        "ignore", "The epoch parameter in `scheduler.step\\(\\)` was not necessary"
    )
    warnings.filterwarnings("ignore", "Lazy modules are a new feature")
    torch.set_default_dtype(torch.float64)
    if os.environ["SHOAL_LOCAL_INDEX"] == "0":
        with CoordinatorClient(ChannelSettings(address=os.environ["SHOAL_COORDINATOR"])) as client:
            for number in range(len(CASES)):
                client.create_job(
                    pb.JobSpec(
                        job_id=f"job-{number}",
                        min_workers=1,
                        max_workers=WORLD,
                        join_grace_ms=120_000,
                        lease_ms=15_000,
                    )
                )
    wanted = os.environ.get("CASES", "")
    outcomes = {name: outcome(name) for name in CASES if wanted in name}
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_LOCAL_INDEX']}.json").write_text(
        json.dumps(outcomes)
    )


if __name__ == "__main__":
    main()
