"""A rendezvous store for torch in Redis, and the init methods redis:// and rediss:// for torch.

- `redis_store`: the store. It runs `scripts` in Redis, and its waits are woken when a key is
  written (`wakeups`).
- `rendezvous`: creates a store for plain torch scripts. `errors`: the exceptions.
"""
