"""Benchmarks on a single CUDA device: `python -m benchmarks.gpu`, `make bench-gpu`. Without a
device, they print a message and measure nothing.

- `steps` takes training steps of a small model in several ways, and `traces` counts the operations
  that the host queues on the device in these steps.
- `groups` measures copies to the host, and the cost of an NCCL group with a single rank.
- `decoder` is a model of 1.3 billion parameters. With it, `large` compares several systems,
  `coordinator` compares a worker of a job with a process without services, and `checkpoint`
  measures the pause caused by a checkpoint.
- `pair` runs two ranks of plain torch that share the device over NCCL.
- `recovery` splits the time lost by a worker's death into its parts.

Where plain torch can do the same, its figures on the same device are shown too. There are no
targets. A `context` is passed to each part.
"""
