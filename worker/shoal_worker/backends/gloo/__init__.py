"""Gloo over TCP, for CPU clusters: groups that can be aborted immediately, and short sums that
bypass Gloo's threads.

`backend` implements the backend. `forming` connects a group, `interruptible` is a group that can be
interrupted, and `sockets` finds and breaks its connections. `reconfigurable` lets a group change
its ranks. Collectives return the objects in `works`; `on_devices` handles tensors on CUDA devices.
`short_sums` sums a few numbers without Gloo.
"""
