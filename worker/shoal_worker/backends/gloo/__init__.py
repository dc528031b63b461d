"""Gloo over TCP, for CPU clusters: groups that end at once, and short sums beside Gloo's own
threads.

`backend` forms groups (`forming`) that can be interrupted (`interruptible`), over `sockets` that it
can break, and `reconfigurable` replaces one by the next; `works` are what collectives return,
`on_devices` is what they need for tensors of CUDA devices, and `short_sums` adds a few numbers up
without Gloo.
"""
