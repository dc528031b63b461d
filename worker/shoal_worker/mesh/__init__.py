"""The engine of the strategies tensor, pipeline and hybrid, for models that are split along
up to three axes: pipeline x tensor x data.

`engine` performs steps. `layouts` determines the mesh for any number of ranks, and which rank has
which part of each tensor. `rank_mesh` connects the ranks of a generation, for torch's
tensor-parallel code through a `step_group`. `parts` stores this rank's part of the model, and
`data_axis` may shard it along the data axis. `gradients` accumulates gradients. `resharding`
assembles the state from the ranks' parts, tensor by tensor, when the ranks change and for
checkpoints.
"""
