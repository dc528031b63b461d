"""Transfers the state of partitions between servers, for backups and for moves of partitions.

A backup follows its primary's journal and replaces the primary if it is lost
(docs/explanation/parameter-servers.md#backups): `primary` and `standby` implement the two sides. In
a move, a server hands partitions over to another server
(docs/explanation/parameter-servers.md#moving-partitions): `transfer_source` and `transfer_sink`
implement the two sides. `items` defines the format of the transferred data.
"""
