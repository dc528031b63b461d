"""Interface of engines, and code shared by all engines. Nothing here depends on a particular
strategy or engine.

`base`: what a model, an optimizer and the session require of an engine. `partitioned`: the end of a
step if no rank needs the whole model. `state`: parameters, buffers and optimizer state. `step`:
passes, and the changes that they make.
"""
