"""Shell around the pure core: gRPC, clocks, and a loop per job that applies events, commits the
result and announces it.

The shell runs on one event loop. Only the HTTP pages are served on threads, from immutable states.
"""
