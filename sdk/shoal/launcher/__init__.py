"""Starts Shoal's processes on this machine: a local cluster and, like torchrun, the workers of a
script.

The package runs only on Linux (it uses pidfd, prctl and setsid). It does not import torch, so that
`shoal run` starts quickly. It is not called `launch` because `shoal.launch` is the public function
that starts ranks from a notebook.
"""
