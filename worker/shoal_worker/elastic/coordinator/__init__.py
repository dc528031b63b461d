"""Membership of this process in a job, and what the coordinator learns about it.

- `member`: interface of a membership, as used by the session. `membership`: that of a job with a
  coordinator. `fixed`: that of ranks which are threads of a launch or MPI's.
- `link`: the stream to the coordinator. `outbox`: its outgoing messages. `coordinator_messages`:
  their conversion from and to protobuf.
- `progress`: figures in heartbeats and metrics. `stall_watch`: reports unreachable peers.
"""
