"""The interface of engines, and code shared by all of them. It knows no strategy and no single
engine.

`base` is what a model, an optimizer and the session ask of an engine; `partitioned` is the end of a
step where no rank need hold the whole model. `state` has parameters, buffers and optimizer state,
and `step` has passes and their changes.
"""
