"""This machine: memory allocation, child processes, temporary directories, and its addresses."""
