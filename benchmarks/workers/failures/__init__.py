"""Training loops of T17: the same task under each system. Each loop records in a ledger which
samples it trained."""
