"""Membership of this process in a job, and its communication with the coordinator.

- `member`: interface of a membership, as used by the session. `membership`: its implementation in a
  job with a coordinator. `fixed`: its implementation for ranks of `shoal.launch` or MPI.
- `link`: the stream to the coordinator. `outbox`: outgoing messages. `coordinator_messages`:
  conversion of messages from and to protobuf.
- `progress`: progress of this worker, for heartbeats and metrics. `stall_watch`: detects and
  reports unreachable peers. `script_lines`: finds the line of the script where a worker hangs.
  `hang_report`: collects stack traces that explain a stalled step.
"""
