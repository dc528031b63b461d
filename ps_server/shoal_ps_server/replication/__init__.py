"""Transfers of partition state between servers, for backups and for moves.

A backup follows its primary's journal and may take over its place
(docs/explanation/parameter-servers.md#backups): `primary` is the followed server's side, `standby`
the follower's. A server hands partitions over to another
(docs/explanation/parameter-servers.md#moving-partitions): `giving` and `taking` are the two sides.
`items` defines the transferred items.
"""
