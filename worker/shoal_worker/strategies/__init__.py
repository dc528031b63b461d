"""The strategies, each with a `declaration`, listed in `registry`.

- `sharded`: strategies that shard state across the data-parallel ranks.
- `model`, `optimizer`: wrappers of the user's model and optimizer for every strategy.
  `whole_groups`: the optimizer's parameter groups as the script sees them. `fitting`: a complete
  training loop in one call.
"""
