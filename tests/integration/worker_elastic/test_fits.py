"""`optimizer.optimize(data)` on ranks that die ends like the fit of a single rank, and reports the
change to the script if it asked for that."""

from pathlib import Path

import pytest
import shoal

from tests.integration.worker_elastic import fitted
from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "zero2"])
def test_fit_with_a_killed_rank_ends_like_the_fit_of_one_rank(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    (alone,) = shoal.launch(fitted.fit, strategy, world_size=1)
    with cluster(zygote, tmp_path, script=Path(fitted.__file__), STRATEGY=strategy) as running:
        for index in range(3):
            running.start(
                index, **({"SHOAL_FAILPOINTS": "session.before_apply@8=kill"} if index == 1 else {})
            )
        results = running.finish(0, 2)
    for found in results:
        assert found["changes"] == [[3, 2]]
        assert found["parameters"] == alone["parameters"]
        history, expected = found["result"]["history"], alone["result"]["history"]
        assert [record["metric"] for record in history] == [record["metric"] for record in expected]
        assert (found["result"]["steps"], found["result"]["samples"]) == (4 * 5, 4 * 80)
    assert alone["changes"] == []
