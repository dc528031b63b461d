"""A check that data workers die with a killed rank."""

from __future__ import annotations

import subprocess
import sys

import psutil


def assert_workers_die_with(program: str) -> None:
    """Runs a program that prints "ready" when it has at least two data workers, kills it, and waits
    until the workers have ended."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [
            child for child in children if "resource_tracker" not in " ".join(child.cmdline())
        ]
        assert len(workers) >= 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
