"""torch's rendezvous store over Redis, and torch's init methods redis:// and rediss://.

`redis_store` implements the store. The store runs `scripts` in Redis, and its waits sleep until a
key is written (`wakeups`). `rendezvous` creates a store for plain scripts, and `errors` defines the
exceptions.
"""
