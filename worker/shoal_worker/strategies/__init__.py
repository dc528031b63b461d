"""The strategies: a file with a `declaration` each, listed in `registry`. `model` and `optimizer`
are what users hold under all of them, `whole_groups` what they find in the optimizer's groups, and
`fitting` is a whole fit in one call."""
