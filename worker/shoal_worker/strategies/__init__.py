"""The strategies, each with a `declaration`, listed in `registry`.

- `sharded`: strategies that shard over the data-parallel ranks.
- `model`, `optimizer`: the user's objects under every strategy. `whole_groups`: the contents of the
  optimizer's groups. `fitting`: a complete fit in one call.
"""
