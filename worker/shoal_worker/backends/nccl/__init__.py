"""NCCL for CUDA devices. When a group ends, no kernel is left that reads or writes its memory.

`backend` forms groups. `device` contains all calls of CUDA and of torch's ProcessGroupNCCL; tests
replace it by a device without a GPU. `group` is the process group: callers wait for its collectives
until the device has finished, for each collective or for several together (`ordered`). `ending`
ends the group. `sharing` refuses two ranks on one device.
"""
