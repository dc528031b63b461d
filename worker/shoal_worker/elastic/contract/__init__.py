"""Values, interfaces and pure rules shared by the other packages of elastic. No I/O, no threads, no
clock.

- `generation`: the ranks of one generation. `phase`: phases of the user's script in the run.
  `step`: the step in progress, the trace of its collectives, and its step vote. `reconcile`:
  decides what the ranks of a new generation do, from each rank's status.
- `last_state`: digests of a rank's final state. `reported_loss`: losses and other numbers that a
  rank reports.
- Interfaces: `loader_interface` (loaders), `channel` (messages between ranks), `row_store` (rows of
  sparse tables on servers). The interface of engines is `elastic/state/strategy_interface.py`.
"""
