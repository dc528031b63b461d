"""A loader of numbers, and a function that runs one of its epochs."""

from shoal_worker.data.loader import ElasticDataLoader


def loader_of(n=10, dataset=None, **options):
    """Returns a loader of the numbers below `n`, in order and four per step."""
    return ElasticDataLoader(
        list(range(n)) if dataset is None else dataset,
        **{"global_batch_size": 4, "shuffle": False, **options},
    )


def run_epoch(loader, session):
    """Runs an epoch in which every step commits. Returns its batches."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.committed(session.placement)
    return batches
