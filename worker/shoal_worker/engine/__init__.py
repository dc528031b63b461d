"""Interface of engines, and code that several engines share. An engine trains the model of a
strategy. Nothing here depends on a particular strategy or engine.

`base`: the interface that model, optimizer and session use. `partitioned`: base of engines whose
ranks need not have the full model, and the end of their steps. `state`: parameters, buffers and
optimizer state. `step`: forward and backward passes, and what they change besides gradients.
"""
