"""What an engine is, and what all engines share.

`base` is what a model, an optimizer and the session ask of an engine; `partitioned` adds how a step ends where no rank need hold all of the
model (`closing`, `state_in_parts`), and `holders` says who holds which shard and who sends it. Shared by all: passes over a batch
(`passes`), collectives whose failure makes the step lost (`losing`), parameters that users give (`parameters`), models built without values
(`materialize`), buffers that a step changes (`buffers`), modules that compute activations again (`activation_checkpointing`), compressed
gradients (`compressed`), which parameters are gathered or reduced together (`parameter_groups`), and parameters that are elsewhere
(`elsewhere`). It knows no strategy and no single engine.
"""
