"""A device without a GPU that has NCCL's semantics on CPU tensors, for tests of
`shoal_worker.backends.nccl`.

`machine` has the devices of all ranks and their queues. `library` replaces torch's ProcessGroupNCCL
and the CUDA device of one rank. `ranks` has backends on it.
"""
