"""Scripts keep torch's own backends beside Shoal: "nccl" is what torch says it is."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from torch.distributed import distributed_c10d as c10d

def tables():
    backends = c10d.Backend
    return {
        "creators": {
            name: plugin.creator_fn
            for name, plugin in backends._plugins.items()
            if not name.startswith("SHOAL_")
        },
        "types": {
            name: kind
            for name, kind in backends.backend_type_map.items()
            if not name.startswith("shoal_")
        },
        "devices": dict(backends.default_device_backend_map),
    }

before = tables()
assert before["devices"]["cuda"] == "nccl"
import shoal
import shoal_worker.backends.nccl.backend
assert "shoal_gloo" in c10d.Backend.backend_list
assert tables() == before
"""


def test_shoal_changes_none_of_torchs_own_backends() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=240, check=True)
