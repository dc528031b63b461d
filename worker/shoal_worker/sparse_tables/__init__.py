"""Sparse tables, whose rows are on parameter servers or in memory.

- `embedding`: the module that users put into a model.
- `worker_tables`: lookups and pushes of async_sgd. `step_tables`: the same for ranks that take
  steps together, with their `row_sums` and expected `bucket_versions`. `ddp_hook`: interface of ddp
  to it.
- `row_reader`: reads rows from the servers. `server_rows`: reads and writes whole buckets, for
  checkpoints.
"""
