"""The worker processes of the benchmarks: the same training loop on Shoal, on torch's DDP, on
torchft and on a bare Gloo group.

Each module is a separate program, started as `python -m benchmarks.workers.NAME` from the
repository's root. The worker for torchft can therefore run in the peers' environment, where Shoal
is not installed. `workload` and `steplog` import neither Shoal nor torchft.
"""
