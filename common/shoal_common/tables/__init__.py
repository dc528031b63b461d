"""Sparse tables: rows by 64-bit id, created when they are first trained
(docs/explanation/parameter-servers.md#sparse-tables).

`declaration` defines a table's initialization, optimizer and eviction; `values` has the hash of ids
and the untrained rows, which are functions of id and seed; `rows` stores the trained ones, on a
parameter server or in a local process; `wire` defines the format for transfers, and `file` that of
an entire bucket in transfers and checkpoints.
"""
