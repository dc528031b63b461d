"""The ParameterServer service on grpc.aio: parses requests, splits streams into parts, and composes
responses.

`servicer` has the RPCs. `transfers` implements uploads (`intake`) and `pulls` for gRPC and for the
`bulk` channel; `whole_buckets` copies buckets for checkpoints. `requests` and `streams` parse
messages, and `staging` limits the memory of received data. `layouts` is this server's copy of the
shard map, `primary_place` its place in the job, and `mover` gives partitions away.
"""
