"""Streams: their sources, and the ways to deal their items to ranks.

`stream` defines the supported kinds, and `reader` reads one from any position, in this process or
in data workers (`sources`). `fingerprints` detect whether a stream repeats its items.
`position_supply` deals a stream's steps by position, or `shard_supply` by `lanes`; `supply` is
common to both, and `evaluation` deals a stream for evaluation.
"""
