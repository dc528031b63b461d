"""The strategies: a file with a `declaration` each, listed in `registry`. `model` and `optimizer` are what users hold under all of them,
`fitting` is a whole fit in one call."""
