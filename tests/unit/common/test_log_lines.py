"""Log lines: one per record."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import ConfigurationError
from shoal_common.telemetry import configure_logging
from shoal_common.telemetry.logs import LineFormatter


def line(message: str, **extra: object) -> str:
    record = logging.LogRecord("shoal_demo.core", logging.INFO, __file__, 1, message, (), None)
    record.__dict__.update(extra)
    return LineFormatter("demo").format(record)


def test_a_line_has_time_level_service_logger_message_and_extras():
    formatted = line("member joined", member_id="4f2c", host="node 1", detail='say "hi"', empty="")
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO demo shoal_demo\.core member joined "
        r'member_id=4f2c host="node 1" '
    )
    assert re.fullmatch(pattern + r'detail="say \\"hi\\"" empty=""', formatted)


@given(st.text(), st.text())
def test_a_record_never_takes_two_lines(message, value):
    formatted = line(message.replace("%", ""), value=value)
    assert "\n" not in formatted
    assert "\r" not in formatted


def test_tracebacks_are_on_the_same_line():
    script = """
import logging
from shoal_common.telemetry import configure_logging
configure_logging("demo", "info")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("x").exception("failed", extra={"step": 3})
logging.getLogger("x").debug("not shown")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    assert re.fullmatch(
        r'\S+ ERROR demo x failed step=3 exception="Traceback .*ZeroDivisionError: division by '
        r'zero"\n',
        done.stderr,
    )


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigurationError, match="'LOUD'"):
        configure_logging("demo", "LOUD")
