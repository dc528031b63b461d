"""A client generated from the .proto files in another language creates a job, joins it as a member,
and reads refusals and events."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.coordinator.harness import Coordinator
from tests.zygote.children import Zygote

ROOT = Path(__file__).parents[3]
SAID = """\
created: true
refused: INVALID_ARGUMENT / REQUEST_INVALID: max_workers=2: expected 3 to 10000
generation 1: rank 0 of 1
phase: JOB_PHASE_FINISHED
event: job_created
event: member_joined member-of-node
event: member_ready member-of-node
event: generation_formed
event: job_finished
event: member_left member-of-node
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="Node.js and npm are not installed")
def test_javascript_client_talks_to_the_coordinator(zygote: Zygote, tmp_path: Path) -> None:
    program = shutil.copytree(
        ROOT / "examples" / "javascript",
        tmp_path / "javascript",
        ignore=shutil.ignore_patterns("node_modules"),
    )
    installed = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=program,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    coordinator = Coordinator(zygote, tmp_path, "--redis", "embedded://").start()
    try:
        command = ["node", "client.js", coordinator.address, str(ROOT / "protos")]
        ended = subprocess.run(
            command, cwd=program, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        coordinator.close()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, SAID, "")
