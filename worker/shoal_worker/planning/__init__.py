"""What each strategy would cost, before anything is started: `shoal.plan` and `shoal plan`.

`planner` plans the `candidates` for a `subject`, a model without values and its optimizer; `shares`
says what a rank holds and sends, in the words of `costs`, read off the layouts by which the engines
cut a model. `passes` runs forward and backward once on tensors without values, `step_time`
estimates, with `pipeline_time` for schedules, and `plan` is the answer, also as text, in `units`
that people read. Nothing here trains, communicates or needs a session.
"""
