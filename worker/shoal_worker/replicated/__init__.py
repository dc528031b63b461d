"""Models of which every rank holds the whole: gradients summed over the ranks in each step, or parameters averaged every few steps.

`engine` is that of ddp, `local_sgd` stands on it. `reduction` sums gradients in `buckets` as they come, `accumulation` after micro-batches;
`rounds` averages parameters.
"""
