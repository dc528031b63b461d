"""Sparse tables, whose rows are on parameter servers or in this process's memory.

- `embedding`: the module that users add to a model.
- `worker_tables`: lookups and pushes under async_sgd. `step_tables`: lookups and pushes of ranks
  that take steps together (ddp), with their `row_sums` and expected `bucket_versions`. `ddp_hook`:
  the interface between ddp and `step_tables`.
- `row_reader`: reads rows from the servers. `server_rows`: reads and writes entire buckets, for
  checkpoints.
"""
