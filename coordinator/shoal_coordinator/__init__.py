"""Shoal's coordinator: decides which processes belong to a job, in which generation and with which
rank. docs/explanation/membership.md explains the rules."""
