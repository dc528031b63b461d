"""Pipeline parallelism: splits a model into stages and executes torch's schedules over any process
group. Independent of strategies and sessions.

`rank_pipeline` is one rank's part of a pipeline. `split` divides the model into stages, and
`partial` runs one stage's part. `schedule` provides torch's schedules, `executor` executes them,
communicating over `links`, and `micro_batches` splits batches.
"""
