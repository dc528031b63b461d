"""Formats that several processes use: tensors and compressed gradients on the wire, rank tables,
and tallies in files."""
