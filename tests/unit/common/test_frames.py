"""Reading the frames of all threads does not deadlock with a garbage collection."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

from shoal_common.system.frames import current_frames

_SCRIPT = """
import gc, threading
from shoal_common.system.frames import current_frames

def read():  # a call whose frame object does not exist yet
    assert threading.get_ident() in current_frames()

def leave_garbage():
    local = threading.local()
    local.value = 1
    garbage = [local]
    garbage.append(garbage)

gc.set_threshold(1)
for _ in range(1000):
    leave_garbage()
    read()
assert gc.isenabled()
"""


def test_frames_are_read_during_collections_without_a_deadlock() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=120)


def test_collections_stay_disabled_if_they_were() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_forked_child_reads_its_frames() -> None:
    child = os.fork()
    if not child:
        os._exit(len(current_frames()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
