"""Shoal's coordinator: decides which processes belong to a job, in which generation and with which
rank. See docs/decisions/0020 to 0023."""
