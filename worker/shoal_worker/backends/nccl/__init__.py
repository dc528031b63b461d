"""NCCL for CUDA devices: groups that end without leaving a kernel that reads or writes their
memory.

`backend` forms groups. `device` contains all calls of CUDA and of torch's ProcessGroupNCCL; tests
replace it by a device without a GPU. `group` is the process group, whose collectives are awaited
until the device is done, one by one or together (`ordered`). `ending` ends it. `sharing` refuses
two ranks on one device.
"""
