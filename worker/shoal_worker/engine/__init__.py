"""The interface of engines, and code shared by all of them. It knows no strategy and no single
engine.

- `base`: what a model, an optimizer and the session ask of an engine. `partitioned`: the end of a
  step where no rank need hold all of the model.
- `state/`, parameters and their state. Sharded state: `parameter_groups` (parameters that are
  gathered or reduced together, and whose activations are recomputed), `partitioned_state`
  (questions to any sharded state), `holders` (which rank holds a shard, and which sends it),
  `hidden_parameters` (parameters whose values or gradients are elsewhere). Modules: `parameters`
  (those of users; models built without values), `module_state` (all state of a module, by tensor),
  `extremes` (minima and maxima in buffers), `optimizer_state` (state per element of a parameter,
  and how it is loaded).
- `step/`, passes and their changes: `passes` (calls of a module, and its loss), `ranks_in_passes`
  (messages to other ranks in a pass), `buffers` (changed by a step), `pass_writes` (anything else
  that a pass changes), `compressed` (compressed gradients), `failed_collectives` (a failure makes a
  step lost), `tentative_update` (what is restored when a batch does not count).
"""
