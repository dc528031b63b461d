"""NCCL, for CUDA devices: `backend`, with the process group that it forms."""
