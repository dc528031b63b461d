"""Rules that decide when members may push and pull: the fence against evicted members, the clocks
of asp, ssp and bsp, and the waits on both."""
