"""`shoal demo`: trains on real handwritten digits with faults, on a cluster of processes on this
machine.

digits      the data set and the network
train       the workers' script, synchronous or asynchronous: an ordinary training script
trace       records of the workers' steps, and their reader
stage       one training run: starts it, watches it, injects the faults, stops it
screen      the live table
report      the figures, the verdict and the plot
director    both runs, one after the other: `main`
"""

from shoal.demo.director import main

__all__ = ["main"]
