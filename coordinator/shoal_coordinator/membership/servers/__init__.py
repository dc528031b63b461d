"""Rules about parameter servers.

- `servers`: servers register, fail and are replaced by backups. `places`: their numbers.
- `rebalancing`: a plan of partitions for the present servers. `moves`: moves partitions by it.
"""
