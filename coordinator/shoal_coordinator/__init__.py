"""Shoal's coordinator: decides which processes belong to a job, in which generation and with which
rank. See docs/explanation/membership.md."""
