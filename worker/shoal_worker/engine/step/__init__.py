"""Forward and backward passes of a step, and the changes that they make besides gradients.

`passes`: calls a module and computes its loss. `ranks_in_passes`: communication with other ranks in
a pass. `buffers`: buffers that a step changes. `pass_writes`: all other changes by a pass.
`compressed`: compression of gradients. `failed_collectives`: collectives whose failure aborts the
step. `tentative_update`: updates that can be undone if their step is aborted.
"""
