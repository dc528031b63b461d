"""Starts Shoal's processes on this machine: a local cluster, and the workers of a script, as
torchrun would.

The package is Linux only (pidfd, prctl, setsid) and free of torch: `shoal run` starts while
torchrun would still be importing it. It is not called `launch` because `shoal.launch` is the public
function that starts ranks from a notebook.
"""
