"""Streams: how they are read, and how their items are dealt to ranks.

`stream` defines the supported kinds. `reader` reads a stream from any position, in this process or
in data workers (`sources`). `fingerprints` are used to check that a stream yields the same items
each time it is read. `position_supply` deals a stream's steps by position, and `shard_supply` deals
them by `lanes`; `supply` contains their common code. `evaluation_batches` deals a stream for
evaluation.
"""
