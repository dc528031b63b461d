"""Models that are cut along several axes at once: pipeline x tensor x data. The engine of tensor,
pipeline and hybrid.

`engine` trains; `layouts` says how any number of ranks is divided along the axes, and where each
tensor lies then; `rank_mesh` connects the ranks of this generation
(`step_group`), `parts` is what this rank holds, over `data_axis`; `gradients` adds up, and
`resharding` puts the state together out of the ranks' parts, tensor by tensor, when the ranks
change and for checkpoints.
"""
