"""What all engines share.

Models built without values (`materialize`), buffers that a step changes (`buffers`), modules that compute activations again
(`activation_checkpointing`), compressed gradients (`compressed`), which parameters are gathered or reduced together (`parameter_groups`),
parameters that are elsewhere (`elsewhere`), and a state that no rank has whole (`state_in_parts`). It knows no strategy and no engine.
"""
