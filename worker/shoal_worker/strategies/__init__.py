"""The strategies: one file with a `declaration` each, listed in `registry`. `model` and `optimizer`
define the user's objects under all of them, `whole_groups` the contents of the optimizer's groups,
and `fitting` a complete fit in one call."""
