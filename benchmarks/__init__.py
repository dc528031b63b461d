"""Benchmarks that measure Shoal side by side with comparable systems (its peers): `python -m
benchmarks`, `make bench`."""
