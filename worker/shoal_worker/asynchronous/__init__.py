"""The engine of async_sgd: a worker's side of the parameter servers.

`engine` trains and puts the other modules together. `outer_steps` implements the rounds of a worker
that takes several steps between two pushes, and `round_leases` leases the batches of such rounds.
`participation` records whether others wait for this worker, and `handover` transfers a peer's state
to a joiner.

`servers` talks to all servers and `server_link` to one. A link uses a `connection`, `pulls`, a
`prefetch` for the next batch, calls in the `background`, and `persistence` while its server is
unreachable. They pass each other a `delivery`; the `ledger` records the worker's progress for each
partition, and `tensors` holds what they send.

`tables` looks up the rows of sparse tables and determines what is pushed to them. `step_tables`
does the same for strategies whose ranks take steps together, with their `row_sums` and known
`bucket_versions`. `row_reader` reads rows from the servers, and `row_store` reads and writes whole
buckets for checkpoints.

`options` holds the user's options, and `optimizers` both the optimizer that steps here and the one
that the servers run. `job` talks to the coordinator, and `leases` leases batches from it.
`server_waits` measures how long the training thread has waited for a server, and `own_cluster`
starts a coordinator and a server for a script that runs without a cluster.
"""
