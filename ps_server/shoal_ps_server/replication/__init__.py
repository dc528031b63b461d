"""Transfers the state of partitions between servers, for backups and for moves of partitions.

A backup follows its primary's journal and may take over its place
(docs/explanation/parameter-servers.md#backups): `primary` implements the primary's side, `standby`
the backup's. In a move, a server hands partitions over to another server
(docs/explanation/parameter-servers.md#moving-partitions): `giving` implements the giver's side,
`taking` the receiver's. `items` defines the format of the transferred data.
"""
