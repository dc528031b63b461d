"""The worker processes of the benchmarks: the same training loop on Shoal, on torch's DDP, on
torchft and on a bare Gloo group.

Each module is a program of its own, started as `python -m benchmarks.workers.NAME` from the
repository's root, so that the one for torchft runs in the peers' environment, where Shoal is not
installed. `workload` and `steplog` import neither.
"""
