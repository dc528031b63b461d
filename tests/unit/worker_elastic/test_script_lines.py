"""A worker that makes no progress reports the script's line, and what that line waits for."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from shoal_worker.elastic.coordinator.coordinator_messages import progress_message
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.coordinator.script_lines import remember_source, script_line
from shoal_worker.metrics import WorkerMetrics

from tests.unit.worker_elastic.test_progress import Clock
from tests.zygote.children import eventually

SCRIPT = """
import multiprocessing, queue, socket, subprocess, threading, torch

ended, items, held = threading.Event(), queue.Queue(), threading.Lock()
child = subprocess.Popen(["sleep", "600"])
server = socket.create_server(("127.0.0.1", 0))
may_load = multiprocessing.get_context("fork").Event()
held.acquire()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        may_load.wait()
        return index

def on_an_event():
    ended.wait()  # the comment is left out

def on_a_queue():
    items.get()

def on_a_process():
    child.communicate()

def on_a_data_worker():
    for batch in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        pass

def on_a_connection():
    server.accept()[0].close()

def on_a_lock():
    held.acquire()

def release():
    ended.set()
    items.put(1)
    child.kill()
    may_load.set()
    socket.create_connection(server.getsockname()).close()
    held.release()
"""
POSITIONS = {
    "on_an_event": ":19 in on_an_event (ended.wait()), waiting for a lock or another thread",
    "on_a_queue": ":22 in on_a_queue (items.get()), waiting for a queue",
    "on_a_process": ":25 in on_a_process (child.communicate()), waiting for a child process",
    "on_a_data_worker": ":28 in on_a_data_worker (for batch in torch.utils.data.DataLoader(Slow(), "
    "num_workers=1, ...), waiting for a DataLoader worker",
    "on_a_connection": ":32 in on_a_connection (server.accept()[0].close()), waiting for the "
    "network",
    "on_a_lock": ":35 in on_a_lock (held.acquire())",
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports the script, as the one that the process runs."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    remember_source()
    path.unlink()  # positions do not read it again
    spec = importlib.util.spec_from_loader("train", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(SCRIPT, str(path), "exec"), module.__dict__)
    return module


def test_a_position_names_the_scripts_line_and_what_it_waits_for(script: ModuleType) -> None:
    threads = {
        name: threading.Thread(target=getattr(script, name), daemon=True) for name in POSITIONS
    }
    for thread in threads.values():
        thread.start()
    try:
        for name, position in POSITIONS.items():
            ident = threads[name].ident
            assert ident is not None
            eventually(
                lambda ident=ident, position=position: script_line(ident) == f"train.py{position}",
                lambda ident=ident: script_line(ident),
            )
    finally:
        script.release()
        for thread in threads.values():
            thread.join(timeout=60)
        script.child.wait()
        script.server.close()


def test_a_thread_without_a_line_of_the_script_has_no_position() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    assert thread.ident is not None
    assert script_line(thread.ident) == ""
    ended.set()
    thread.join()
    assert script_line(thread.ident) == ""


def test_heartbeats_have_the_position_once_there_was_no_progress_for_five_seconds() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    clock.now += 60
    assert meter.snapshot().script_line == ""  # the loop has not begun
    meter.entered()
    clock.now += 4.9
    assert meter.snapshot().script_line == ""
    clock.now += 0.2
    position = progress_message(meter.snapshot()).script_line
    assert "test_script_lines.py:" in position
    assert "in test_heartbeats_have_the_position" in position
    meter.entered()
    assert meter.snapshot().script_line == ""
