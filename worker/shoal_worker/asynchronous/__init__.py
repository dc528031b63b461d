"""Engine of async_sgd: a worker that trains with parameter servers, without a process group.

- `engine`: trains, using the other modules and the client of the parameter servers.
- `outer_steps`: rounds, which consist of the steps between two pushes. `round_leases`: leases the
  batches of a round together.
- `participation`: tracks whether other workers have to wait for this one. `handover`: sends a
  worker's state to joiners.
- `optimizers`: the worker's optimizer and the servers' optimizer.
"""
