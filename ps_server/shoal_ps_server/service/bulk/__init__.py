"""The bulk channel, an alternative to gRPC for uploads and pulls
(docs/explanation/parameter-servers.md#transport).

`server` listens and serves the streams of each `connection`, which a client opens with one of the
`tickets`. `hang_ups` notices peers that disconnect while their streams wait. `descriptors` limits
the channel's open files.
"""
