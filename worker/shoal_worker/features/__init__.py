"""Features that work with any engine.

- `several_models`: several models in one loop, combined in one engine. `model_session`: the session
  as seen by the engine of one of these models.
- `synchronized_norms`: layers that normalize over all ranks' samples.
- `whole_batch`: gathers the rows of all ranks' samples, for losses over the entire batch.
"""
