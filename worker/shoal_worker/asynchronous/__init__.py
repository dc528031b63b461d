"""The engine of async_sgd: a worker that trains without a process group, over parameter servers.

- `engine`: trains, and combines the other modules with the client of the parameter servers.
- `outer_steps`: rounds of several steps between two pushes. `round_leases`: leases their batches.
- `participation`: whether others wait for this worker. `handover`: a peer's state for a joiner.
- `optimizers`: the optimizer that steps here and the one that the servers run.
"""
