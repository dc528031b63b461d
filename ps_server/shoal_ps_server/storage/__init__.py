"""Durability of a server's state: a change is written to disk before it is applied, and answered
afterwards (docs/explanation/parameter-servers.md#journal-and-snapshots).

`changes` passes every change through the `journal`, which writes `record`s to `segments`. A
`snapshot` of the server's `image` replaces a journal that has grown; `keeper` decides when. Both
are stored in a data `directory`, from which `recovery` restores a server. `moves` records the
partitions that move to or from another server.
"""
