"""Models that are cut along several axes at once: pipeline x tensor x data. The engine of tensor, pipeline and hybrid.

`engine` trains; `layouts` says how any number of ranks is divided along the `axes`, and where each tensor lies then; `rank_mesh` connects
the ranks of this generation (`step_group`), `parts` is what this rank holds, over `data_axis`; `gradients` adds up, and `resharding` moves
parts when the ranks change.
"""
