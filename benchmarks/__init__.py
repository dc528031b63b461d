"""Benchmarks of Shoal, measured side by side with its peers: `python -m benchmarks`, `make
bench`."""
