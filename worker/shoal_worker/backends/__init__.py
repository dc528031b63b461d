"""Communication backends: collectives over process groups that can be aborted and formed again.

`base` defines the interface of a backend. `waits` records how long a rank waits for its peers.
`gloo`, `inmemory`, `mpi` and `nccl` implement one backend each, and `registry` finds them by name.
`python_group` is a torch process group written in Python; `collective` describes collectives as
data and executes them, and `sparse_sum` adds up sparse tensors. `native_threads` waits for torch's
threads before the process exits, `process_end` terminates a process that cannot continue, and
`worlds` gives each thread that is a rank its own torch.distributed world. Importing this package
registers the process groups "shoal_gloo", "shoal_inmemory" and "shoal_mpi" with torch.
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
