"""Who may push and pull, and when: the fence against members that are out, the clocks of asp and
ssp, and the waits on both."""
