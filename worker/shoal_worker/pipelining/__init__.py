"""Pipeline parallelism: a model cut into stages, and torch's schedules carried out over any process
group. No strategy and no session here.

`pipeline` is one rank's part; `split` cuts the model, `partial` runs what one stage has of it;
`schedule` has torch's orders, `executor` carries them out over `links`, and `micro_batches` cuts
batches.
"""
