"""The exit status that is known while a script's interpreter shuts down. The scripts run as real
processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import atexit, importlib.util, sys
sys.path.append({common!r})
backward = False
# without torch, which the package imports
spec = importlib.util.spec_from_file_location("script_end", {path!r})
script_end = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script_end)
end = script_end.ScriptEnd(in_backward=lambda: backward)
end.install()
atexit.register(lambda: print(end.failure()))
"""
ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "worker" / "shoal_worker" / "elastic" / "session" / "script_end.py"


@pytest.mark.parametrize(
    ("ending", "status", "failure"),
    [
        ("pass", 0, "None"),
        ("sys.exit()", 0, "None"),
        ("sys.exit(0)", 0, "None"),
        ("sys.exit(False)", 0, "None"),
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("sys.exit('bad data')", 1, "sys.exit('bad data')"),
        ("(lambda: sys.exit(3))()", 3, "sys.exit(3)"),
        ("raise SystemExit(3)", 3, "None"),  # the status cannot be known here
        ("raise SystemExit((lambda: 0)())", 0, "None"),
        ("raise ValueError('x')", 1, "ValueError: x"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "None"),
        ("try: sys.exit(0)\nexcept SystemExit: raise ValueError('x')", 1, "ValueError: x"),
        (
            "import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); "
            "t.join()",
            0,
            "None",
        ),
        # A hook on one of autograd's threads, which re-raises the exception.
        (
            "import concurrent.futures; backward = True\nwith "
            "concurrent.futures.ThreadPoolExecutor() as autograd:\n"
            "    error = autograd.submit(sys.exit, 3).exception()\nraise error",
            3,
            "sys.exit(3)",
        ),
    ],
)
def test_failed_script_is_distinguished_from_a_successful_one(
    ending: str, status: int, failure: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE.format(path=str(SOURCE), common=str(ROOT / "common")) + ending)
    ended = subprocess.run(
        [sys.executable, "-S", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout.strip()) == (status, failure), ended.stderr
