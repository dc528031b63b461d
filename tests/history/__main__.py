"""`python -m tests.history`: runs one job in each mode for each seed, under faults, and prints the
verdict."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from pathlib import Path

from tests.history.campaign import Campaign
from tests.history.modes import MODES
from tests.history.verdict import Verdict
from tests.zygote.children import Zygote


def main() -> int:
    """Runs all campaigns; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.history", description=__doc__)
    parser.add_argument("--seeds", default="1", help="comma-separated (default: 1)")
    parser.add_argument(
        "--faults", type=int, default=600, help="of each seed, in all modes together (default: 600)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        action="append",
        help="backups: asp where each server has one; moves: servers come and go (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/chaos"),
        help="where histories are kept that show a violation",
    )
    options = parser.parse_args()
    modes = options.mode or MODES
    verdicts = []
    zygote = Zygote()
    try:
        for seed in map(int, options.seeds.split(",")):
            for mode in modes:
                directory = options.out.resolve() / f"{mode}-{seed}"
                shutil.rmtree(directory, ignore_errors=True)
                verdict = Campaign(
                    zygote, directory, mode=mode, seed=seed, faults=-(-options.faults // len(modes))
                ).run()
                verdicts.append(verdict)
                print(verdict, flush=True)
                if verdict.broken:
                    print(f"  the history is kept in {directory}", flush=True)
                else:
                    shutil.rmtree(directory)
    finally:
        zygote.close()
    print(summary(verdicts))
    return int(any(verdict.broken for verdict in verdicts))


def summary(verdicts: list[Verdict]) -> str:
    """Returns one line about all campaigns."""
    total: Counter[str] = Counter()
    for verdict in verdicts:
        total.update(verdict.counts)
    broken = [
        f"{promise} (seed {verdict.seed}, {verdict.mode})"
        for verdict in verdicts
        for promise in verdict.broken
    ]
    volume = (
        f"{sum(verdict.faults.total() for verdict in verdicts)} faults, "
        f"{total['pushes acknowledged']} pushes acknowledged"
    )
    if broken:
        return f"BROKEN after {volume}: {'; '.join(broken)}"
    kept = (
        "0 lost, 0 applied twice, versions monotonic, moments and rows intact, bound kept, "
        "samples once"
    )
    return (
        f"{volume}, {total['partitions pulled']} partitions pulled, {total['lookups of rows']} "
        f"lookups of rows: {kept}"
    )


if __name__ == "__main__":
    sys.exit(main())
