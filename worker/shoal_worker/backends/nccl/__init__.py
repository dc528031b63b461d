"""NCCL, for CUDA devices: groups that end without a kernel left that reads or writes their memory.

`backend` forms groups. `device` is all that speaks to CUDA and to torch's ProcessGroupNCCL; tests
put a device without a GPU in its place. `group` is the process group, whose collectives are waited
for until the device is done, at once or once for many (`ordered`); `ending` ends it; `sharing`
refuses two ranks on one device.
"""
