"""Pipeline parallelism: splits a model into stages and executes torch's schedules over any process
group. Does not depend on strategies or sessions.

`pipeline` is one rank's part of a pipeline; `split` splits the model, and `partial` runs the part
of one stage. `schedule` provides torch's orders, `executor` executes them over `links`, and
`micro_batches` divides batches.
"""
