"""Streams: their sources, and the ways to deal their items to ranks.

`stream` defines the supported kinds, and `reader` reads a stream from any position, in this process
or in data workers (`sources`). `fingerprints` detect whether a stream repeats its items.
`position_supply` deals a stream's steps by position, and `shard_supply` deals them by `lanes`;
`supply` contains their common code. `evaluation` deals a stream for evaluation.
"""
