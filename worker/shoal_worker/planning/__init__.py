"""Estimates the cost of each strategy before anything is started: `shoal.plan` and `shoal plan`.

- `planner`: plans each of the `candidates` for a `subject`, which is a model on the meta device
  with its optimizer.
- `shares`: computes a rank's memory and traffic (`costs`) from the layouts that the engines use to
  split a model. `traced_passes`: runs the forward and backward passes once on fake tensors.
- `step_time`: estimates durations; `pipeline_time`: those of pipeline schedules.
- `plan`: the result, which can be rendered as text. `units`: formats and parses its numbers.

This package neither trains nor communicates, and does not need a session.
"""
