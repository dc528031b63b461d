"""Fifty scripts of which one rank hangs, each with the cause that the diagnosis must name.

A row of HANGS is a class of causes with its variants. A variant has the line that hangs, the lines
that prepare it, and a pattern of the named cause. A seed chooses everything else: the number of
ranks, which of them hangs and when, the strategy, and the place of the line in the script.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LOOP: Final = "loop"
"""The line is in a function that the training loop calls."""
START: Final = "start"
"""The line is between the call to shoal and the loop."""
DATA: Final = "data"
"""The line is in the dataset, and a data worker executes it."""
ALL: Final = "all"
"""The lines replace the body of the training loop."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to hang."""

    line: str
    cause: str
    """Regular expression of the cause in the diagnosis."""
    before: str = ""
    """Lines that prepare it, at the start of the script on every rank."""
    place: str = LOOP
    seeds: int = 1
    """Number of scripts that are made of this variant."""
    names_rank: bool = True
    """False if several ranks diverge, or all hang; none of them is then the cause."""
    source: str = ""
    """Part of the script's line that the diagnosis must quote; empty: `line`'s first characters."""


_LOCK = "waiting for a lock or another thread"
_WORKER = "waiting for a DataLoader worker, which is "
_FIFO = 'os.mkfifo(f"fifo{os.getpid()}"); fifo = f"fifo{os.getpid()}"'
_FULL = textwrap.dedent(
    """
    def full_pipe():
        read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while True: os.write(write, bytes(4096))
        except BlockingIOError:
            os.set_blocking(write, True)
        return write
    """
)
_SERVER = textwrap.dedent(
    """
    server = socket.create_server(("127.0.0.1", 0)); address = server.getsockname()
    """
)

HANGS: Final[dict[str, list[Variant]]] = {
    "sleep": [
        Variant(line="time.sleep(600)", cause="sleeping", seeds=2),
        Variant(line="time.sleep(600)", cause=_WORKER + ".*sleeping", place=DATA, seeds=2),
    ],
    "lock": [
        Variant(line="lock.acquire()", before="lock = threading.Lock(); lock.acquire()",
                cause=_LOCK, seeds=3),
        Variant(line="threading.Event().wait()", cause=_LOCK),
        Variant(line="queue.Queue().get()", cause="waiting for a queue", seeds=2),
        Variant(line="thread.join()", cause=_LOCK,
                before="thread = threading.Thread(target=time.sleep, args=(600,), daemon=True); "
                "thread.start()"),
        Variant(line="shared.acquire()", cause=_LOCK,
                before="shared = multiprocessing.Lock(); shared.acquire()"),
        Variant(line="results.result()", cause=_LOCK,
                before="pool = concurrent.futures.ThreadPoolExecutor(); "
                "results = pool.submit(time.sleep, 600)"),
    ],
    "data worker": [
        Variant(line="os.kill(os.getpid(), signal.SIGSTOP)", cause=_WORKER + "stopped", place=DATA,
                seeds=2, source="for "),
        Variant(line="open(fifo).read()", cause=_WORKER + ".*opening fifo", place=DATA,
                before=_FIFO, seeds=2),
        Variant(line="lock.acquire()", cause=_WORKER + ".*" + _LOCK, place=DATA,
                before="lock = threading.Lock(); lock.acquire()"),
        Variant(line="os.kill(os.getpid(), signal.SIGKILL)", place=DATA, seeds=2,
                cause=r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)"),
    ],
    "disk": [
        Variant(line="open(fifo).read()", before=_FIFO, cause="opening fifo", seeds=2),
        Variant(line="os.read(os.open(fifo, os.O_RDWR), 1)", before=_FIFO,
                cause="reading .*fifo"),
        Variant(line="open(fifo, 'r+b', 0).read(1)", before=_FIFO,
                cause="reading .*fifo"),
        Variant(line="fcntl.flock(mine, fcntl.LOCK_EX)", cause="waiting for the lock of the file",
                before="other = open('lock', 'a'); fcntl.flock(other, fcntl.LOCK_SH); "
                "mine = open('lock', 'a')"),
        Variant(line="all ranks", before=_FIFO, place=ALL, names_rank=False,
                cause=r"no rank of generation 1 makes progress: rank 0 \(.* opening fifo.* and "
                r"rank 1 \(.* opening fifo"),
    ],
    "output": [
        Variant(line="print('x' * 100, flush=True)", cause="writing to standard output",
                before="{full}", source="print("),
        Variant(line="os.write(full, bytes(4096))", cause="writing to a pipe",
                before="full = full_pipe()"),
        Variant(line="logging.warning('x' * 100)", cause="writing to standard error",
                before="{full}"),
    ],
    "debugger": [
        Variant(line="pdb.Pdb(stdin=typed, stdout=sys.stdout).set_trace()", seeds=2,
                before=f"{_FIFO}; typed = os.fdopen(os.open(fifo, os.O_RDWR))",
                cause="in the debugger"),
    ],
    "network": [
        Variant(line="socket.create_connection(address).recv(1)", before=_SERVER,
                cause="waiting for the network"),
        Variant(line="urllib.request.urlopen('http://%s:%d' % address)", before=_SERVER,
                cause="waiting for the network"),
        Variant(line="select.select([server], [], [])", before=_SERVER,
                cause="waiting for input or the network"),
    ],
    "Python's lock": [
        Variant(line="re.match('(a+)+$', 'a' * 60 + 'b')", cause="holds Python's lock", seeds=2),
        Variant(line="[libc.pthread_mutex_lock(mutex) for _ in '12']", cause="holds Python's lock",
                before="libc = ctypes.PyDLL(None); mutex = ctypes.create_string_buffer(64)"),
        Variant(line="sum(range(10**13))", cause="holds Python's lock"),
    ],
    "computing": [
        Variant(line="while True: len('a')", cause=r"with no progress for \d+ s(?! and no CPU)",
                seeds=2),
        Variant(line="while True: torch.randn(400, 400) @ torch.randn(400, 400)",
                cause=r"with no progress for \d+ s(?! and no CPU)"),
    ],
    "child": [
        Variant(line="subprocess.run(['sleep', '600'])", cause="waiting for a child process"),
        Variant(line="os.system('sleep 600')", cause="waiting for a child process"),
    ],
    "stopped": [
        Variant(line="os.kill(os.getpid(), signal.SIGSTOP)", cause="it is stopped", source=" ",
                seeds=2),
    ],
    "missing": [
        Variant(line="time.sleep(600)", cause="sleeping", place=START, seeds=2),
        Variant(line="lock.acquire()", before="lock = threading.Lock(); lock.acquire()",
                cause=_LOCK, place=START),
    ],
    "diverged": [
        Variant(line="optimizer.step()", cause=r"optimizer.step\(\) was not called", place=ALL,
                names_rank=False),
        Variant(line="shoal.barrier()", cause=r"ranks diverged \(rank \d(:| is in) ",
                names_rank=False, seeds=2),
        Variant(line="order", cause=r"ranks diverged \(rank 0(:| is in) \w+, rank \d(:| is in) \w+",
                place=ALL, names_rank=False, seeds=2),
        Variant(line="break", cause="ranks diverged", place=ALL, names_rank=False),
        Variant(line="uneven", place=ALL, names_rank=False,
                cause=r"rank \d is in (end of the run, .* is in a step|a step, .* is in end)"),
    ],
}  # fmt: skip


_BODIES: Final = {
    "optimizer.step()": """{here} pass
        else: optimizer.step(); optimizer.zero_grad()""",
    "break": """optimizer.step(); optimizer.zero_grad()
        {here} break""",
    "order": """optimizer.step(); optimizer.zero_grad()
        calls = [shoal.barrier, lambda: shoal.gather(1)]
        if loader.global_step == {step}: [call() for call in calls[:: 1 - 2 * (RANK == {rank})]]""",
    "uneven": "optimizer.step(); optimizer.zero_grad()",
    "all ranks": """optimizer.step(); optimizer.zero_grad()
        if loader.global_step == {step}: open(fifo).read()""",
}
"""Ends of the training loop's body for the variants at the place ALL. The ranks of "uneven" have
different numbers of batches, in a loop without Shoal's loader."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with a hang, and what its diagnosis must contain."""

    name: str
    text: str
    ranks: int
    rank: int | None
    """Rank that hangs; None if several ranks diverge, or all hang."""
    cause: str
    line: str


def scripts() -> Iterator[Script]:
    """Yields all scripts. Every call yields the same ones."""
    for kind, variants in HANGS.items():
        for number, variant in enumerate(variants):
            for seed in range(variant.seeds):
                yield _script(f"{kind} {number}.{seed}", variant)


def _script(name: str, variant: Variant) -> Script:
    draw = random.Random(name)
    ranks, step = draw.choice([2, 2, 3]), draw.randint(2, 6)
    rank, strategy = draw.randrange(ranks), draw.choice(["ddp", "zero2"])
    before_step = variant.place == LOOP and variant.names_rank and draw.random() < 0.5
    in_data = variant.place == DATA
    here = f"if shoal.rank() == {rank} and loader.global_step == {step}:"
    steps, after = "optimizer.step(); optimizer.zero_grad()", f"        {here} hang()"
    if variant.place == ALL:
        after, steps = "", _BODIES[variant.line].format(here=here, rank=rank, step=step)
    at_start = f"if RANK == {rank}: hang()" if variant.place == START else ""
    if variant.place == START:
        after = ""
    epochs, batches = "loader.epochs(4)", "loader"
    if variant.line == "uneven":
        epochs, batches = "range(4)", f"torch.randn(8 - {step} * (RANK == {rank}), 6, 3)"
    before = variant.before.replace("{full}", "full = full_pipe(); FULL = True")
    body = variant.line if variant.place != ALL else "pass"
    text = f"""\
import concurrent.futures, ctypes, fcntl, logging, multiprocessing, numpy, os, pdb, queue, re
import select, shoal, signal, socket, subprocess, sys, threading, time, torch, urllib.request
{_FULL}
FULL = False
{before}

def hang():
    if FULL: os.dup2(full, 1); os.dup2(full, 2)
    {body}

class Data(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, index):
        if {in_data} and RANK == {rank} and index > 36: hang()
        return torch.randn(3)

net = torch.nn.Linear(3, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01),
                                        strategy={strategy!r})
RANK = shoal.rank()
{at_start}
loader = shoal.ElasticDataLoader(Data(), global_batch_size=12, shuffle=False,
                                 num_workers={2 if in_data else 0})
for epoch in {epochs}:
    for x in {batches}:
{after if before_step else ""}
        model(x).square().mean().backward()
        {steps}
{"" if before_step or in_data else after}
print("ended")
"""
    return Script(
        name=name,
        text=text,
        ranks=ranks,
        rank=rank if variant.names_rank else None,
        cause=variant.cause,
        line=variant.source or variant.line[:24],
    )
