"""A training state as values: what it consists of, as JSON and tensors, and whether two are the same.

`tree` takes a state apart and puts it together, `serial` makes bytes of one, `snapshot` copies one, `part` is what one rank has of one that
is cut. `digest` compares, `fits` says whether one is of this model or optimizer, and `forwarding` is an
optimizer that stands before another one.
"""
