"""Training loops of T17: the same task by each system. Each notes in a ledger what it trained."""
