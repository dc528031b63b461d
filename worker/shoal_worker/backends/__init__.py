"""Communication backends: collectives over process groups that can be ended and made anew.

`base` has what every backend offers, and `waits` notes how long a rank waits for its peers; `gloo`,
`inmemory`, `mpi` and `nccl` have one backend each, which `registry` knows by name. `python_group`
is a torch process group written in Python, and `collective` what its collectives do to tensors;
`native_threads` waits for torch's threads, `process_end` ends a process that cannot go on, and
`worlds` gives each rank that is a thread a torch world of its own. Importing this package makes
torch know the process groups of the first three ("shoal_gloo", "shoal_inmemory", "shoal_mpi").
"""

from shoal_worker import torch_extensions
from shoal_worker.backends.base import CommunicationBackend, GroupEndedError, Handle, ReduceOp
from shoal_worker.backends.registry import backend_class, backend_names

__all__ = [
    "CommunicationBackend",
    "GroupEndedError",
    "Handle",
    "ReduceOp",
    "backend_class",
    "backend_names",
]

torch_extensions.register()
