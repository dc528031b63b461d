"""Rules about parameter servers.

- `servers`: servers register, fail and are replaced by backups. `places`: each place
  has a share of the tensors, a primary and possibly a backup.
- `rebalancing`: a plan of partitions for the present servers. `moves`: moves partitions by it.
"""
