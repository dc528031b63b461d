"""Ranks with data workers die and join, and every sample counts once."""

import signal
from pathlib import Path

from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.data.record import audit

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually


def test_a_rank_killed_with_its_data_workers_is_replaced_by_a_spare_and_no_sample_is_lost(
    zygote: Zygote, tmp_path: Path
) -> None:
    script = Path(__file__).parent / "train_with_data_workers.py"
    with cluster(zygote, tmp_path, min_workers=2, max_workers=2, script=script) as running:
        for index in range(3):
            running.start(index)
        running.wait_steps(5)
        ranked = {m.member_id for m in running.job().members if m.rank >= 0}
        spare = next(index for index in range(3) if running.members[index] not in ranked)
        killed, left = sorted({0, 1, 2} - {spare})
        eventually(
            lambda: [m for m in running.job().members if m.phase == pb.MEMBER_PHASE_READY],
            "the spare",
        )
        running.signal(killed, signal.SIGKILL)
        (running.output / "go").touch()
        results = running.finish(left, spare)
    assert {r["steps"] for r in results} == {20}
    assert {r["world"] for r in results} == {2}
    verdict = audit(tmp_path / "records")
    assert [(e.expected, e.once, e.lost, e.repeated) for e in verdict.epochs] == [
        (240, 240, 0, 0)
    ] * 2
