"""Code shared by Shoal's services: settings, errors, security, RPC, telemetry, wire formats, Redis,
the gRPC clients, and the optimizers of parameter servers. Only `optimizers.for_torch` (optimizers
that torch lacks) and `tables.rows` import torch."""

import os

# Forked children (a DataLoader's workers) hang or crash when gRPC's fork handlers meet live
# channels. gRPC reads this variable once, on its first import, so it must be set before anything in
# this package imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's own messages about connections would clutter the log; relevant errors reach callers as a
# status.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
