"""Starts Shoal's processes on this machine: a local cluster, and the workers of a script, as
torchrun would.

Everything here is Linux only (pidfd, prctl, setsid) and free of torch: `shoal run` starts while
torchrun would still be importing it. The package is not called `launch` because `shoal.launch` is
the public function that starts ranks from a notebook.
"""
