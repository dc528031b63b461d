"""The strategies: a `declaration` for each, listed in `registry`. Those over data-parallel shards
are in `sharded`. `model` and `optimizer` define the user's objects under all of them,
`whole_groups` the contents of the optimizer's groups, and `fitting` a complete fit in one call."""
