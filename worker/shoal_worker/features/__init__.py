"""Features that build on engines of any kind.

- `several_models`: several models in one loop, as one engine. `model_session`: the session as one
  of these models sees it.
- `synchronized_norms`: layers that normalize over the samples of all ranks.
- `whole_batch`: rows of all ranks, for losses over the whole batch.
"""
