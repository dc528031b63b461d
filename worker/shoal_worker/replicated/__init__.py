"""Models held entirely by every rank: gradients are summed over the ranks in each step, or
parameters averaged every few steps.

`engine` is that of ddp, on which `local_sgd` is based. `reduction` sums gradients as they are
computed, in `buckets`, which also accumulate those of micro-batches; `rounds` averages parameters.
"""
