"""A training state as values: what it consists of, as JSON and tensors, and whether two are the
same.

`tree` takes a state apart, copies it and puts it together, also one that is cut over ranks;
`serial` makes bytes of one. `device_reader` brings what lies on a device to the host. `digest`
compares, `fits` says whether one is of this model or optimizer, and `forwarding` is an optimizer
that stands before another one.
"""
