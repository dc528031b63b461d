"""Sparse tables: rows with 64-bit ids, which are created when they are first trained
(docs/explanation/parameter-servers.md#sparse-tables).

`declaration` defines the initialization, optimizer and eviction of a table. `values` computes the
hash of each id, and the initial values of rows from id and seed alone. `rows` stores trained rows,
on a parameter server or in a local process. `wire` defines the format of rows on the wire, and
`file` the format of a complete bucket, on the wire and in checkpoints.
"""
