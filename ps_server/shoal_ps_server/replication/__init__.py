"""Transfers of partition state between servers, for backups and for moves.

A backup follows its primary's journal and may take over its place (docs/decisions/0198): `primary`
is the followed server's side, `standby` the follower's. A server hands partitions over to another
(docs/decisions/0200): `giving` and `taking` are the two sides. `items` defines the transferred
items.
"""
