"""torch's rendezvous store over Redis, and the init methods redis:// and rediss:// (registered by this import)."""

from shoal_worker.store import rendezvous as rendezvous
from shoal_worker.store.errors import StoreAbortedError, StoreTimeoutError, StoreUnavailableError, StoreValueError
from shoal_worker.store.redis_store import RedisStore

__all__ = ["RedisStore", "StoreAbortedError", "StoreTimeoutError", "StoreUnavailableError", "StoreValueError"]
