"""NCCL, for CUDA devices: `backend`, and the process group that it forms (`device_group`)."""
