"""Transfers of partition state between servers, for backups and for moves of partitions.

A backup follows its primary's journal and may take over its place
(docs/explanation/parameter-servers.md#backups). `primary` implements the followed server's side,
`standby` the backup's side. A server hands partitions over to another server
(docs/explanation/parameter-servers.md#moving-partitions). `giving` implements the giver's side,
`taking` the receiver's side. `items` defines the transferred items.
"""
