"""Features for engines of any kind.

- `several_models`: several models in one loop, combined in one engine. `model_session`: the session
  as the engine of one of these models sees it.
- `synchronized_norms`: layers that normalize over the samples of all ranks.
- `whole_batch`: rows of all ranks, for losses over the whole batch.
"""
