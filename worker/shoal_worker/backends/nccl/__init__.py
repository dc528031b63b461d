"""NCCL for CUDA devices. When a group has ended, no kernel reads or writes its memory any more.

`backend` forms groups. `device` contains all calls to CUDA and to torch's ProcessGroupNCCL; tests
replace it with a device that needs no GPU. `group` is the process group: callers wait until the
device has finished each collective, or wait once for several of them (`ordered`). `ending` aborts
or finalizes the group. `sharing` refuses two ranks on one device.
"""
