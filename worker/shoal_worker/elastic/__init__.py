"""The session: one process's part in a training run whose ranks may fail, leave and join.

The session receives the calls of the user's loop, through loaders (`contract/loader_interface.py`)
and engines (`state/strategy_interface.py`). It returns the outcome of each step, which is the same
on all surviving ranks. Each package imports only packages below it in this list:

- `session`: the session itself, which answers the calls of the user's script.
- `recovery`: steps, step boundaries, and the formation of a generation after a failure or a join.
- `coordinator`: this process's membership in a job.
- `state`: the state after the last committed step, and the interface of engines.
- `group`: the connected ranks of one generation, and transfers between them.
- `contract`: values, interfaces and pure rules that the other packages share.
"""
