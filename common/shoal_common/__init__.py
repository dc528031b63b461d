"""What Shoal's services share: settings, errors, security, RPC, telemetry, wire format, Redis, the
gRPC clients, and the optimizers that parameter servers run (`server_optimizers`). No torch, but in
`optim`, which has those of them that torch lacks."""

import os

# Forked children (a DataLoader's workers) hang or crash when gRPC's fork handlers meet live
# channels; gRPC reads this once, when it is first imported, so it must be set before anything in
# this package imports it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's own notes on connections that come and go would break up the log; what matters reaches
# callers as a status.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
