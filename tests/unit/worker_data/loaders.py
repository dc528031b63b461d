"""Loaders of numbers, and an epoch of one."""

from shoal_worker.data.loader import ElasticDataLoader


def loader_of(n=10, dataset=None, **options):
    """A loader of the numbers below `n`, four in a step, in order."""
    return ElasticDataLoader(
        list(range(n)) if dataset is None else dataset,
        **{"global_batch_size": 4, "shuffle": False, **options},
    )


def run_epoch(loader, session):
    """The batches of an epoch in which every step commits."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.committed(session.placement)
    return batches
