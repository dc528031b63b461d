"""Authentication and encryption: tokens, certificates, and secrets of a process."""
