"""State of a server: the layout, the partitions with their values and optimizers, and the
conversion of an upload to a change."""
