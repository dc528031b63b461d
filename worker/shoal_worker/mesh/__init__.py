"""The engine of the strategies tensor, pipeline and hybrid, for models that are split along
up to three axes: pipeline x tensor x data.

`engine` trains. `layouts` determines the mesh for any number of ranks, and where each tensor is
placed. `rank_mesh` connects the ranks of a generation (`step_group`). `parts` stores this rank's
part of the model, and `data_axis` shards it along the data axis. `gradients` accumulates gradients.
`resharding` assembles the state from the ranks' parts, tensor by tensor, when the ranks change and
for checkpoints.
"""
