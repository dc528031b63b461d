"""The interface of engines, and code shared by all of them. It knows no strategy and no single
engine.

`base` is what a model, an optimizer and the session ask of an engine; `partitioned` adds how a step
ends where no rank need hold all of the model. What is cut: `parameter_groups` (which parameters are
gathered or reduced together, and whose activations are computed again), `state_in_parts` (what any
state that is cut can be asked for), `holders` (who holds which shard, and who sends it),
`hidden_parameters` (parameters whose values or gradients are elsewhere). What several share:
`parameters` (those that users give; models built without values), `optimizer_state` (what of it
belongs to a parameter's elements, and how it is loaded), `module_state` (all of a module's state,
by tensor), `buffers` (which a step changes), `extremes` (minima and maxima among these),
`pass_writes` (what else a pass changes: parameters, attributes and extra state of modules),
`compressed` (gradients), `failed_collectives` (a failure makes the step lost), `ranks_in_passes`
(asking the others in a pass), `synchronized_norms` (layers that normalize over the samples of all
ranks), `whole_batch` (rows of all ranks, for losses), `passes` (calling a module, and its loss).
Several models in one loop: `several_models` (their engines as one), `model_session` (the session as
one of them sees it), `tentative_update` (what is put back when a batch does not count).
"""
