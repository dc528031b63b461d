"""The shell around the core: gRPC, clocks, and one loop per job that folds events, commits and
announces.

Everything here runs on one event loop; only /metrics, /healthz and /sd are served on threads, from
immutable states.
"""
