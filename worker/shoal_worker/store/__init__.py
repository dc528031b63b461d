"""torch's rendezvous store over Redis."""

from shoal_worker.store.errors import StoreAbortedError, StoreTimeoutError, StoreUnavailableError, StoreValueError
from shoal_worker.store.redis_store import RedisStore

__all__ = ["RedisStore", "StoreAbortedError", "StoreTimeoutError", "StoreUnavailableError", "StoreValueError"]
