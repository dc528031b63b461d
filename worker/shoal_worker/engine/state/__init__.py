"""Parameters of a model, its buffers and its optimizer's state.

Sharded state: `parameter_groups` (parameters that are gathered or reduced together, and whose
activations are recomputed), `partitioned_state` (questions to any sharded state), `holders` (which
rank holds a shard, and which sends it), `hidden_parameters` (parameters whose values or gradients
are elsewhere). Modules: `parameters` (those of users; models built without values), `module_state`
(all state of a module, by tensor), `extremes` (minima and maxima in buffers), `optimizer_state`
(state per element of a parameter, and how it is loaded).
"""
