"""Makes a server's state durable: a change is written to disk, then applied, then acknowledged
(docs/explanation/parameter-servers.md#journal-and-snapshots).

`changes` passes every change through the `journal`, which writes `record`s to `segments`. When the
journal has grown, a `snapshot` of the server's `image` replaces it; `keeper` decides when. Both are
stored in a data `directory`, from which `recovery` restores a server. `moves` records which
partitions move to or from another server.
"""
