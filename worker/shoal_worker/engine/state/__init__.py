"""Parameters of a model, its buffers and its optimizer's state.

Sharded state: `parameter_groups` (parameters that are gathered or reduced together; recomputed
activations), `partitioned_state` (interface of any sharded state), `holders` (which ranks have and
send each shard), `hidden_parameters` (placeholders for values and gradients that are not where
torch expects them).

Modules: `parameters` (values passed by users; models on the meta device), `module_state` (complete
state of a module), `extremes` (minima and maxima in buffers), `optimizer_state` (loads an
optimizer's state, and recognizes values with one element per element of the parameter).
"""
