"""Freed memory stays with the process, so allocating and freeing buffers repeatedly causes no page
faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

MEASURE = """
import resource, sys
from shoal_common.system.allocator import keep_freed_memory
if sys.argv[1] != "default":
    assert keep_freed_memory() == (sys.argv[1] == "keep")
def message():
    return b"".join([bytes(16384) for _ in range(64)])  # as gRPC puts a message together
for _ in range(20):
    message()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    message()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


only_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has these settings"
)


def faults(mode: str, **environment: str) -> int:
    command = [sys.executable, "-c", MEASURE, mode]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@only_glibc
def test_recurring_messages_cause_no_more_page_faults() -> None:
    assert faults("default") > 1000
    assert faults("keep") < 50


@only_glibc
def test_malloc_settings_in_the_environment_are_respected() -> None:
    assert faults("refused", MALLOC_TRIM_THRESHOLD_="131072") > 1000
    assert faults("refused", GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072") > 1000
