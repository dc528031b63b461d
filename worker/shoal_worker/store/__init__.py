"""A rendezvous store for torch in Redis, and the init methods redis:// and rediss:// for torch.

`redis_store` implements the store. The store runs `scripts` in Redis, and its waits block until a
key is written (`wakeups`). `rendezvous` creates a store for plain scripts, and `errors` defines the
exceptions.
"""
