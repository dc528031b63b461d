"""Snapshots: a server's whole state as one safetensors file, written atomically, checked bit by bit when it is read."""
