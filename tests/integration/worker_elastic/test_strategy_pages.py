"""Every strategy has a page, and the examples on it run."""

import re
from pathlib import Path

import pytest
from shoal_worker.strategies import registry

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

PAGES = Path(__file__).parents[3] / "docs" / "strategies"
CLUSTERED = sorted(set(registry.names()) - {"async_sgd"})


def examples(strategy: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (PAGES / f"{strategy}.md").read_text(), re.DOTALL | re.MULTILINE
    )


def test_every_strategy_has_a_page_in_the_table_with_an_example(
    subtests: pytest.Subtests,
) -> None:
    table = (PAGES / "README.md").read_text()
    for strategy in registry.names():
        with subtests.test(strategy):
            assert f"({strategy}.md)" in table
            assert any(f'strategy="{strategy}"' in example for example in examples(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*CLUSTERED, "compression"])
def test_the_examples_of_a_page_run_on_two_ranks(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    for number, example in enumerate(examples(strategy)):
        directory = tmp_path / str(number)
        directory.mkdir()
        script = directory / "train.py"
        script.write_text(example)
        with cluster(zygote, directory, max_workers=2, script=script) as running:
            for index in range(2):
                running.start(index)
            assert [running.workers[index].wait() for index in range(2)] == [0, 0], running.said()
            shares = re.findall(r"right: ([0-9.]+)", running.said())
            assert all(float(share) > 0.9 for share in shares), "it says how much it has learnt"
            if strategy == "local_sgd":
                assert len(shares) == 2
