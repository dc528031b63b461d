"""Pipeline parallelism: a model split into stages, and torch's schedules executed over any process
group. No strategy and no session here.

`pipeline` is one rank's part; `split` splits the model, and `partial` runs the part of one stage.
`schedule` provides torch's orders, `executor` executes them over `links`, and `micro_batches`
divides batches.
"""
