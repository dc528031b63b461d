"""Scripts can use torch's own backends beside Shoal: "nccl" remains torch's backend."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from torch.distributed import distributed_c10d as c10d

def tables():
    backends = c10d.Backend
    return {
        "creators": {name: plugin.creator_fn for name, plugin in backends._plugins.items()},
        "types": dict(backends.backend_type_map),
        "devices": dict(backends.default_device_backend_map),
    }

# torch 2.15 registers its own backends when they are first asked for
getattr(c10d.Backend, "_ensure_backend_registered", lambda name: None)("nccl")
before = tables()
assert before["devices"]["cuda"] == "nccl"
import shoal
import shoal_worker.backends.nccl.backend
assert "shoal_gloo" in c10d.Backend.backend_list
after = tables()  # torch may have registered its "fake" backend meanwhile
for table, rows in before.items():
    assert rows.items() <= after[table].items(), (table, rows, after[table])
"""


def test_shoal_changes_none_of_torchs_own_backends() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=240, check=True)
