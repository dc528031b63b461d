"""A worker's client of the parameter servers, used by async_sgd and by sparse tables.

- `servers`: client of all servers. `server_link`: link to one server. It uses a `connection`,
  retries calls while the server is unreachable (`persistence`), and can pull values for the next
  batch early (`prefetch`).
- `ledger`: this worker's progress with each partition. `tensors`: the values and gradients to send
  and receive; `pushed_rows`: rows of sparse tables to push. `background`: calls on background
  threads.
- `coordination`: calls to the coordinator: the worker's job and its leased batches. Also starts the
  services for a script that runs without a cluster.
- `options`: the options of async_sgd.
"""
