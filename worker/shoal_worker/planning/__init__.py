"""Estimates the cost of each strategy before anything is started: `shoal.plan` and `shoal plan`.

`planner` plans the `candidates` for a `subject`: a model on the meta device and its optimizer.
`shares` computes the memory and traffic of a rank, expressed in `costs`, from the layouts that the
engines use to split a model. `traced_passes` runs the forward and backward passes once on fake
tensors. `step_time` estimates durations, using `pipeline_time` for schedules. `plan` is the result,
which can be rendered as text, with numbers formatted by `units`. This package neither trains nor
communicates, and does not need a session.
"""
