"""Shoal's use of gRPC: statuses, channels, servers, interceptors and metrics."""
