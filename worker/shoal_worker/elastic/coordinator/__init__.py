"""Membership of this process in a job, and its communication with the coordinator.

- `member`: interface of a membership, as used by the session. `membership`: its implementation in a
  job with a coordinator. `fixed`: its implementation for ranks of `shoal.launch` or MPI.
- `link`: the stream to the coordinator. `outbox`: outgoing messages. `coordinator_messages`:
  conversion of messages from and to protobuf.
- `progress`: figures in heartbeats and metrics. `stall_watch`: reports unreachable peers.
  `script_lines`: finds the line of the script where a worker hangs. `hang_report`: collects stacks
  that explain a stalled step.
"""
