"""Figures of one CUDA device: `python -m benchmarks.gpu`, `make bench-gpu`. Without a device, it
measures nothing and reports this.

`steps` takes training steps of a small model in several ways; `traces` counts the operations that
the host queued on the device in them; `groups` measures copies to the host, and the cost of a group
of one rank over NCCL. `decoder` is a model of 1.3 billion parameters: `large` compares systems on
it, `coordinator` a worker of a job with a world of one, and `checkpoint` times the pause of a
checkpoint. `pair` has two ranks of plain torch share the device over NCCL, and `recovery` splits
what a death costs into its parts. Figures are shown beside those of plain torch on the same device
if there are any; nothing is judged. `context` is passed to each part.
"""
