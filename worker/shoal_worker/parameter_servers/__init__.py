"""A worker's client of the parameter servers, used by async_sgd and by sparse tables.

- `servers`: all servers. `server_link`: one server, with its `connection`, a `prefetch` of values
  for the next batch, calls in the `background`, and retries (`persistence`) while the server is
  unreachable. `ledger`: the worker's progress with each partition. `tensors`: values and gradients
  in transfer; `pushed_rows`: pushed rows of sparse tables.
- `coordination`: the worker's job, its leased batches, and a cluster of its own.
- `options`: the user's options.
"""
