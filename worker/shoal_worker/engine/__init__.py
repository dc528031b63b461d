"""Interface of engines, and code shared by all engines. Nothing here depends on a particular
strategy or engine.

`base`: the interface that model, optimizer and session use. `partitioned`: base of engines whose
ranks need not have the full model, and the end of their steps. `state`: parameters, buffers and
optimizer state. `step`: forward and backward passes, and the changes that they make.
"""
