"""The brief report of a Shoal error that ends a script: the error's message and the lines of the
script."""

from __future__ import annotations

import pytest
from shoal_common.errors import ConfigurationError, InternalError
from shoal_worker.elastic.session.brief_errors import brief, on_screen
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState


def script(line: str) -> BaseException:
    """Returns the exception that ends a script whose function consists of `line`."""
    source = f"def main():\n    {line}\nmain()\n"
    names = {"state": RegisteredState(), "InternalError": InternalError}
    try:
        exec(compile(source, "/home/someone/train.py", "exec"), names)
    except (ConfigurationError, ZeroDivisionError, InternalError) as error:
        return error
    raise AssertionError("nothing was raised")


def test_shoal_error_is_shown_as_its_sentence_and_the_lines_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = script("state.register('a', object())")
    assert error.__traceback__ is not None
    # skips the frame of this file, which runs the script
    text = brief(error, error.__traceback__.tb_next) or ""
    assert text.splitlines() == [
        "ConfigurationError: register_state(a=...): object has no state_dict() and "
        "load_state_dict(); register an object that has both",
        '  File "/home/someone/train.py", line 3, in <module>',
        '  File "/home/someone/train.py", line 2, in main',
    ]
    monkeypatch.setenv("SHOAL_FULL_TRACEBACKS", "1")
    assert brief(error, error.__traceback__) is None


@pytest.mark.parametrize("line", ["1 / 0", "raise InternalError('a bug')"])
def test_other_exceptions_and_bugs_keep_their_traceback(line: str) -> None:
    error = script(line)
    assert brief(error, error.__traceback__) is None


def test_an_error_without_lines_of_a_script_keeps_its_traceback() -> None:
    assert brief(ConfigurationError("nobody raised it"), None) is None


def test_an_error_that_every_rank_raises_is_left_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = script("state.register('a', object())")
    assert isinstance(error, ConfigurationError)
    error.on_all_ranks = True
    whole = on_screen(error, error.__traceback__)
    assert str(error) in (whole or ""), "without a launcher, nobody else shows it"
    monkeypatch.setenv("SHOAL_LAUNCHER_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
    assert on_screen(error, error.__traceback__) == (
        "ConfigurationError [CONFIGURATION_INVALID] on all ranks: see the end of the output\n"
    )
    error.on_all_ranks = False
    assert on_screen(error, error.__traceback__) == whole
