"""Figures of one CUDA device: `python -m benchmarks.gpu`, `make bench-gpu`. Without a device it measures nothing, and says so.

`steps` takes training steps in several ways; `traces` counts what the host told the device in them; `groups` measures copies to the host,
and what a group of one rank over NCCL costs. It compares with plain torch on the same device, and judges nothing.
"""
