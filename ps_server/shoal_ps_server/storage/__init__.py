"""Durability of a server's state: a change is written here before it is made, and answered
afterwards (docs/explanation/parameter-servers.md#journal-and-snapshots).

`changes` passes every change through the `journal`, whose bytes are `record`s in `segments`. A
`snapshot` of the server's `image` replaces a journal that has grown; `keeper` decides when. Both
are stored in a data `directory`, from which `recovery` restores a server. `moves` tracks partitions
on their way to or from another server.
"""
