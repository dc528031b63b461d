"""Shoal's coordinator: which processes belong to a job, in which generation, with which rank. See
docs/decisions/0020 to 0023."""
