"""Shell around the pure core: gRPC, clocks, and a loop per job that applies events, commits the
result and announces it.

`servicer` has the RPCs, which `methods` registers; `messages` converts protobuf. `jobs` has a
`job_loop` for each job, with the `clock` and the job's open `sessions`. `member_sessions` and
`server_sessions` implement the `streams` of members and servers, and `mailbox` has the messages
that a stream has not sent yet. `discovery` lists targets for Prometheus.

The shell runs on one event loop. Only the HTTP pages are served on threads, from immutable states.
"""
