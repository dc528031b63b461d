"""Passes of a step, and the changes that they make besides gradients.

`passes` calls a module and computes its loss; `ranks_in_passes` sends messages to other ranks in a
pass. `buffers` are changed by a step; `pass_writes` has anything else that a pass changes.
`compressed` gradients; `failed_collectives`, which make a step lost; and `tentative_update`, which
restores what changed if a batch does not count.
"""
