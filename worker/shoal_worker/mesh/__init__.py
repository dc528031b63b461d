"""The engine of tensor, pipeline and hybrid, for models split along several axes at once: pipeline
x tensor x data.

`engine` trains. `layouts` determines how any number of ranks is divided along the axes, and where
each tensor is placed. `rank_mesh` connects the ranks of a generation (`step_group`). `parts` stores
this rank's part, distributed over `data_axis`. `gradients` accumulates gradients. `resharding`
assembles the state from the ranks' parts, tensor by tensor, when the ranks change and for
checkpoints.
"""
