"""The engine of async_sgd: a worker's side of the parameter servers.

`engine` trains: it puts the others together. `outer_steps` has the rounds of a worker that takes
several steps between two pushes, and `round_leases` the batches of these; `participation` says
whether others wait for this worker, and `handover` what a joiner takes of a peer. `servers` speaks
to all servers and `server_link` to one: over a `connection`, with `pulls`, ahead of the next batch
with a `prefetch` in the `background`, and with `persistence` where it is away. What they pass to
each other is a `delivery`, and the `ledger` says how far the worker is with each partition;
`tensors` is what they send; `tables` looks up the rows of sparse tables, and says what is pushed of
them, and `step_tables` does so for strategies whose ranks take steps together, with the `row_sums`
of these and the `bucket_versions` that they know; `row_reader` finds rows on the servers, and
`row_store` reads and puts whole buckets, for checkpoints; `options` are the user's, and
`optimizers` the one that steps here and the one that the servers run; `job` speaks to the
coordinator, and `leases` has its batches; `server_waits` says for how long the training thread has
waited for a server; `own_cluster` starts a coordinator and a server where a script runs by itself.
"""
