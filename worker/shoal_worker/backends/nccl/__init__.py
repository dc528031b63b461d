"""NCCL, for CUDA devices."""
