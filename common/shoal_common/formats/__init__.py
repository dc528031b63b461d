"""Formats that processes share: tensors and compressed gradients on the wire, rank tables, and
tallies in files."""
