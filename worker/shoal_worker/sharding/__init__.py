"""Parameters, gradients and optimizer state cut over the ranks: the machinery of zero1, zero2, zero3, fsdp and hsdp."""
