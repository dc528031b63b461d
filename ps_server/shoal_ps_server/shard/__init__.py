"""What a server holds: the layout, the partitions with their values and optimizers, and how an
upload becomes a change of one."""
