"""Tensor parallelism: one model's layers split over several ranks, on torch's DTensor and `parallelize_module`.

make_plan (derive.py) says how a model is split, parallelize (layers.py) splits it.
The engine that ties this to sessions and optimizers is mesh/engine.py.
"""

from shoal_worker.tensor_parallel.context import DropoutRandomness as DropoutRandomness
from shoal_worker.tensor_parallel.derive import make_plan as make_plan
from shoal_worker.tensor_parallel.layers import parallelize as parallelize
from shoal_worker.tensor_parallel.layers import unparallelize as unparallelize
from shoal_worker.tensor_parallel.loss import vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy
from shoal_worker.tensor_parallel.plan import Split as Split
from shoal_worker.tensor_parallel.plan import Style as Style
from shoal_worker.tensor_parallel.plan import TensorParallelPlan as TensorParallelPlan
from shoal_worker.tensor_parallel.region import loss_parallel as loss_parallel
