"""Engine of async_sgd: a worker that trains with parameter servers, without a process group.

- `engine`: trains, using the other modules and the client of the parameter servers.
- `outer_steps`: rounds of several steps between two pushes. `round_leases`: leases for the batches
  of rounds.
- `participation`: tracks whether other workers wait for this one. `handover`: sends a worker's
  state to joiners.
- `optimizers`: the worker's optimizer and the servers' optimizer.
"""
