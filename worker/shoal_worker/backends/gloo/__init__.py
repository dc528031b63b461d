"""Gloo over TCP, for CPU clusters: groups that can be ended at once, and short sums that bypass
Gloo's threads.

`backend` implements the backend. `forming` connects a group, `interruptible` is a group that can be
interrupted, and `sockets` finds and breaks its connections. `reconfigurable` replaces a group by
the next one. Collectives return the objects in `works`; `on_devices` adds what they need for
tensors on CUDA devices. `short_sums` sums a few numbers without Gloo.
"""
