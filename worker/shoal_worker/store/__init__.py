"""torch's rendezvous store over Redis, and the init methods redis:// and rediss:// of torch.

`redis_store` is the store; it runs `scripts` in Redis, and its waits sleep until a key is written
(`wakeups`). `rendezvous` makes one for plain scripts, and `errors` is what all of them raise.
"""
