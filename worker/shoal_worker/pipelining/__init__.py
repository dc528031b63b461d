"""Pipeline parallelism: splits a model into stages, and runs torch's pipeline schedules over any
process group. Independent of strategies and sessions.

- `rank_pipeline`: the pipeline as one rank uses it.
- `split`: divides a model into stages. `partial`: runs the part of a model that belongs to one
  stage.
- `schedule`: torch's schedules. `executor`: runs the actions of a schedule, which communicate over
  `links`. `micro_batches`: splits batches.
"""
