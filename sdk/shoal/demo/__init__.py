"""`shoal demo`: the main job on real handwritten digits, on a cluster of processes of this machine,
with faults.

digits      the data set and the network
train       what each worker runs, synchronously or asynchronously: an ordinary training script
trace       what each worker notes down of its steps, and the reader
stage       one training run: starts it, watches it, makes the faults, ends it
screen      the live table
report      the figures, the verdict and the plot
director    both runs, one after the other: `main`
"""

from shoal.demo.director import main

__all__ = ["main"]
