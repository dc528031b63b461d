"""gRPC as Shoal uses it: statuses, channels, servers, interceptors."""
