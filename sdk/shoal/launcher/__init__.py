"""Starts Shoal's processes on this machine: a local cluster, and the workers of a script, as
torchrun would.

Everything here is Linux only (pidfd, prctl, setsid) and free of torch: `shoal run` must be on its
way while torchrun still imports it. The package is not called `launch` because `shoal.launch` is
the public function that starts ranks from a notebook.
"""
