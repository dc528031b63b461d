"""Rules about parameter servers.

- `servers`: servers register, fail and are replaced by backups. `places`: each place
  has a share of the tensors, a primary and possibly a backup.
- `rebalancing`: plans which partitions to move between the present servers. `moves`: carries out
  the plans.
"""
