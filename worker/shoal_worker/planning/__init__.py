"""Estimates the cost of each strategy before anything is started: `shoal.plan` and `shoal plan`.

`planner` plans the `candidates` for a `subject`: a model without values and its optimizer. `shares`
computes the memory and traffic of a rank, expressed in `costs`, from the layouts that the engines
use to split a model. `passes` runs the forward and backward passes once on tensors without values.
`step_time` estimates durations, using `pipeline_time` for schedules. `plan` is the result, also as
text, with numbers formatted by `units`. This package does not train, communicate or need a session.
"""
