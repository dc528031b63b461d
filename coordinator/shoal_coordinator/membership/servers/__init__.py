"""Rules about parameter servers. Each server belongs to a place: a share of the tensors, with a
primary server and possibly a backup.

- `servers`: servers register, fail and are replaced by backups. `places`: finds and notifies the
  servers of a place.
- `rebalancing`: plans which partitions to move between servers. `moves`: carries out the plans.
"""
