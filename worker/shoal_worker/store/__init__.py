"""torch's rendezvous store over Redis, and torch's init methods redis:// and rediss://.

`redis_store` is the store; it runs `scripts` in Redis, and its waits sleep until a key is written
(`wakeups`). `rendezvous` creates one for plain scripts, and `errors` defines the exceptions.
"""
