"""Tensor parallelism: splits one model's layers across several ranks, based on torch's DTensor and
`parallelize_module`.

- `split_plan`: describes how layers are split. `derive`: creates a model's plan from its `blocks`,
  which are found by name or by data flow.
- `layers`: splits the layers (`multihead`: torch's attention layer).
- `region`: the context in which a forward pass runs, with special rules for `attention` and the
  `loss`. `context`: the tensor-parallel group that layers use.

The engine that connects this package to sessions and optimizers is mesh/engine.py.
"""

from shoal_worker.tensor_parallel.context import DropoutRandomness as DropoutRandomness
from shoal_worker.tensor_parallel.derive import make_plan as make_plan
from shoal_worker.tensor_parallel.layers import parallelize as parallelize
from shoal_worker.tensor_parallel.layers import unparallelize as unparallelize
from shoal_worker.tensor_parallel.loss import (
    vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
)
from shoal_worker.tensor_parallel.region import loss_parallel as loss_parallel
from shoal_worker.tensor_parallel.split_plan import Split as Split
from shoal_worker.tensor_parallel.split_plan import Style as Style
from shoal_worker.tensor_parallel.split_plan import TensorParallelPlan as TensorParallelPlan
