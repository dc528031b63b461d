"""Shell around the pure core: gRPC, clocks, and one loop per job that applies events, commits and
announces.

The shell runs on one event loop. Only the HTTP pages are served on threads, from immutable states.
"""
