"""Rules that decide when members may push and pull: the fence, which rejects evicted members; the
clocks of asp, ssp and bsp; and the waits that the fence and the clocks require."""
