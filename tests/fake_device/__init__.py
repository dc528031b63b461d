"""A device without a GPU: NCCL's semantics on CPU tensors, for tests of
`shoal_worker.backends.nccl`.

`machine` is the devices of all ranks, with what is queued on them; `library` is the stand-in for
torch's ProcessGroupNCCL and for the CUDA device of one rank; `ranks` are backends on it.
"""
