"""The shell around the core: gRPC, clocks, and one loop per job that folds, commits and announces.

Everything here runs on one event loop; only /metrics, /healthz and /sd are answered on threads,
from immutable states.
"""
