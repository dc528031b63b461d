"""Streams: their sources, and the ways to deal their items to ranks."""
