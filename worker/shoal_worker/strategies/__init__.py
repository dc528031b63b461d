"""The strategies. Each module of a strategy contains its `Strategy` declaration (`declaration`),
and `registry` lists them.

- `sharded`: the strategies that shard state across the data-parallel ranks.
- `model`, `optimizer`: wrappers of the user's model and optimizer, for every strategy.
  `whole_groups`: the optimizer's parameter groups as the script sees them. `fitting`: a complete
  training loop in one call.
"""
