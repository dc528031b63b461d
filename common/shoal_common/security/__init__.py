"""Authentication and encryption: tokens, certificates, and how a process handles its secrets."""
