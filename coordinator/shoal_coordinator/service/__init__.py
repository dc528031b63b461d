"""Shell around the pure core: gRPC, clocks, and a loop per job that applies events, commits the
result and announces it.

- `servicer`: the RPCs. `methods`: registers them on a gRPC server. `messages`: converts protobuf
  messages.
- `jobs`: all jobs. `job_loop`: the loop of one job. `clock`: the time that decisions use.
- `member_sessions`, `server_sessions`: the RPCs for sessions; `streams` has the code that they
  share.
- `sessions`: the open sessions of one job. `mailbox`: the messages that have not yet been sent in a
  session.
- `discovery`: lists targets for Prometheus.

The shell runs on one event loop. Only the HTTP pages are served on other threads, from immutable
states.
"""
