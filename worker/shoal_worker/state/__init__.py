"""Training states as values: decomposition into JSON and tensors, and comparison.

`tree` decomposes, copies and reassembles a state, also one that is split over ranks; `serial`
converts one to bytes. `device_reader` copies data from a device to the host. `digest` compares
states, `fits` checks whether one belongs to this model or optimizer, and `forwarding` wraps an
optimizer.
"""
