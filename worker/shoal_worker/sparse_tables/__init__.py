"""Sparse tables, whose rows are on parameter servers or in this process's memory.

- `embedding`: the modules that users add to a model.
- `worker_tables`: lookups and pushes under async_sgd.
- `step_tables`: lookups and pushes under ddp, where all ranks take each step together. `row_sums`
  sums the row gradients of all ranks, `bucket_versions` tracks the version that each bucket should
  have, and `ddp_hook` is the interface between ddp's engine and `step_tables`.
- `row_reader`: reads rows from the servers. `server_rows`: reads and writes entire buckets, for
  checkpoints.
"""
