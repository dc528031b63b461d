"""Access to this machine's operating system: memory allocation, child processes, temporary
directories, stacks, and network addresses."""
