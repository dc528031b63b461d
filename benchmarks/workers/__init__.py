"""The worker programs of the benchmarks: the same training loop with Shoal, torch's DDP, torchft
and other systems.

Each program is a module, started as `python -m benchmarks.workers.NAME` from the repository's root.
The worker for torchft can therefore run in a different environment, in which Shoal is not
installed. `workload` and `steplog`, which all programs share, import neither Shoal nor torchft.
Docstrings call the benchmark's main process, which starts the workers, the harness.
"""
