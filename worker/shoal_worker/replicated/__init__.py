"""Models of which every rank holds the whole: gradients summed over the ranks in each step, or
parameters averaged every few steps.

`engine` is that of ddp, `local_sgd` stands on it. `reduction` sums gradients as they come, in
`buckets`, where those of micro-batches are added up too; `rounds` averages parameters.
`step_tables` is what the engine asks of sparse tables.
"""
