"""The runner of the pages' terminal sessions: which outputs it accepts as equal, and which it
rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sessions import Session, alike, blocks_of

SHOWN = (
    "killed rank 1 of job train-bc39ee: SIGKILL to pid 9692\n[0]: step 5 is lost: reset by "
    "peer\n[0]: epoch 9: loss 0.1\n"
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SHOWN, True),
        (
            "killed rank 2 of job train-0f3912: SIGKILL to pid 17\n[2]: step 71 is lost: "
            "closed\n[0]: epoch 9: loss 12.5\n",
            True,
        ),
        (
            "[2]: step 71 is lost: closed\nkilled rank 2 of job train-0f3912: SIGKILL to pid "
            "17\n[0]: epoch 9: loss 12.5\n",
            True,
        ),
        # killed between two steps
        ("killed rank 2 of job train-0f3912: SIGKILL to pid 17\n[0]: epoch 9: loss 12.5\n", True),
        (SHOWN.replace("epoch", "step"), False),
        (SHOWN + "Traceback\n", False),
        ("", False),
    ],
)
def test_numbers_and_names_may_differ_and_words_may_not(said: str, expected: bool) -> None:
    assert alike(SHOWN, said) is expected


def test_number_of_decimals_is_not_compared() -> None:
    assert alike("loss 0.0064\n", "loss 0.001884\n")


def test_number_of_workers_is_compared() -> None:
    assert alike(
        "running, generation 1, 3 of 3 workers have a rank\n",
        "running, generation 7, 3 of 3 workers have a rank\n",
    )
    assert not alike(
        "running, generation 1, 3 of 3 workers have a rank\n",
        "running, generation 1, 2 of 3 workers have a rank\n",
    )


def test_dots_match_any_lines() -> None:
    assert alike("a\n...\nd\n", "a\nb\nc\nd\n")
    assert not alike("a\n...\nd\n", "a\nb\nc\n")


def test_worker_and_launcher_lines_are_each_compared_in_their_own_order() -> None:
    shown = (
        "shoal: rank 1 ended\nshoal: went on\n[0]: epoch 9 is done\n...\n[0]: the digest is "
        "3\nshoal: came to its end\n"
    )
    assert alike(
        shown,
        "shoal: rank 1 ended\n[0]: epoch 9 is done\nshoal: went on\n[0]: the digest is 3\nshoal: "
        "came to its end\n",
    )
    assert not alike(
        shown,
        "shoal: went on\nshoal: rank 1 ended\n[0]: epoch 9 is done\n[0]: the digest is 3\nshoal: "
        "came to its end\n",
    )
    assert not alike(
        shown,
        "shoal: rank 1 ended\nshoal: went on\n[0]: the digest is 3\n[0]: epoch 9 is done\nshoal: "
        "came to its end\n",
    )


def follow(folder: Path, page: str) -> Session:
    (folder / "page.md").write_text(page)
    session = Session(folder, {"PATH": "/usr/bin:/bin"})
    try:
        session.follow(blocks_of(folder / "page.md"))
    finally:
        session.close()
    return session


def test_a_file_is_written_and_a_terminal_keeps_its_variables(tmp_path: Path) -> None:
    page = (
        '```python title="a.txt"\nhello\n```\n\n```console\n$ NAME=me\n$ cat a.txt; echo '
        "$NAME\nhello\nme\n```\n"
    )
    assert follow(tmp_path, page).printed == [
        ("NAME=me", ""),
        ("cat a.txt; echo $NAME", "hello\nme\n"),
    ]


def test_command_beside_a_running_one_is_repeated_until_it_prints_the_expected_output(
    tmp_path: Path,
) -> None:
    page = """```console title="first terminal"
$ echo begun > state; until grep -q go state; do sleep 0.02; done; echo over
```

```console title="second terminal"
$ cat state
begun
$ echo go > state
```

```console title="first terminal"
over
```
"""
    assert follow(tmp_path, page).printed[-1][1] == "over\n"


def test_failing_or_unexpected_output_is_reported_with_the_actual_output(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"was to print\nhello\n\nbut printed\nbye"):
        follow(tmp_path, "```console\n$ echo bye\nhello\n```\n")
    with pytest.raises(AssertionError, match="ended with status 3"):
        follow(tmp_path, "```console\n$ (exit 3)\n```\n")


def test_additional_lines_of_a_slow_machine_are_ignored() -> None:
    said = (
        "[0]: the others are waiting for rank 1 (vm): it works for 5.9 s of each step, the others "
        "for 7 ms\nshoal: step 256 of 256 (100%), 0:00:00 left\ndone"
    )
    assert alike("done", said)
    assert not alike("done", "[0]: generation 1 stands\ndone")
