"""Engine of async_sgd: a worker that trains with parameter servers, without a process group.

- `engine`: trains, and combines the other modules with the client of the parameter servers.
- `outer_steps`: rounds of several steps between two pushes. `round_leases`: leases the batches of
  rounds.
- `participation`: tracks whether other workers wait for this one. `handover`: a peer's state for a
  joiner.
- `optimizers`: the optimizer that steps on the worker, and the one that the servers run.
"""
