"""Makes a server's state durable: a change is written to disk, then applied, then acknowledged
(docs/explanation/parameter-servers.md#journal-and-snapshots).

`changes` passes every change through the `journal`, which writes `record`s to `segments`. When the
journal has grown, a `snapshot` of the server's `image` replaces it; `snapshot_keeper` decides when.
Both are stored in a data `directory`; `recovery` restores a server from it. `moves` records which
partitions are moving to or from another server.
"""
