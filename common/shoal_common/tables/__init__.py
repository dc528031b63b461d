"""Sparse tables: rows by 64-bit id, created when they are first trained
(docs/explanation/parameter-servers.md#sparse-tables).

`declaration` defines a table's initialization, optimizer and eviction; `values` computes the hash
of each id and the initial values of untrained rows, from id and seed alone; `rows` stores the
trained rows, on a parameter server or in a local process; `wire` defines the format for transfers;
`file` defines the format of an entire bucket in transfers and checkpoints.
"""
