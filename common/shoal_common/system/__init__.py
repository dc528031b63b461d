"""Services of this machine: memory allocation, child processes, temporary directories, stacks, and
network addresses."""
