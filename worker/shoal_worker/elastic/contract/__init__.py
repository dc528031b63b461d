"""Values and pure rules on which the other packages agree. No I/O, no threads, no clock.

- `generation`: the ranks of one generation and their mirrors. `phase`: where the script is in the
  run. `step`: the step in progress and its step vote. `reconcile`: what the ranks of a new
  generation do, given the state of each.
- `collective_trace`: digest of the collectives issued in a step. `last_state`: digests of the state
  at a rank's end. `reported_loss`: the loss that a rank reports.
- Interfaces: `loader_interface` (loaders), `channel` (messages between ranks), `row_store` (rows of
  sparse tables on servers). The interface of engines is `elastic/state/strategy_interface.py`.
"""
