"""The ParameterServer service on grpc.aio: parses requests, splits streams into partitions, and
composes responses.

- `servicer`: the RPCs. `requests`, `streams`: parse messages.
- `transfers`: uploads (`intake`) and pulls (`pulls`), for gRPC and for the `bulk` channel.
  `staging`: limits the memory of received data.
- `whole_buckets`: copies buckets of sparse tables to and from checkpoints.
- `layouts`: this server's copy of the shard map. `primary_place`: this server's place in the job.
  `mover`: gives partitions away.
"""
