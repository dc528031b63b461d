"""A worker's client of the parameter servers, used by async_sgd and by sparse tables.

- `servers`: all servers. `server_link`: one server, with its `connection`, a `prefetch` of values
  for the next batch, calls in the `background`, and retries (`persistence`) while the server is
  unreachable. `ledger`: the worker's progress with each partition. `tensors`: values and gradients
  in transfer; `pushed_rows`: pushed rows of sparse tables.
- `job`: calls to the coordinator. `leases`: batches leased from the coordinator. `own_cluster`: a
  coordinator and a server, for a script that runs without a cluster.
- `options`: the user's options. `server_waits`: time spent waiting for servers.
"""
