"""gRPC for Shoal: statuses, channels, servers, interceptors."""
