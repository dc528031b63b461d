"""Gloo over TCP, for CPU clusters: groups that end at once, their sockets, and short sums beside Gloo's own threads."""
