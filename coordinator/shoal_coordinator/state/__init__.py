"""Storage of jobs in Redis. store.py is the only module of the coordinator that accesses Redis;
codec.py defines the format."""
