"""torch's rendezvous store over Redis (`redis_store.RedisStore`), and the init methods redis:// and rediss:// of torch."""
