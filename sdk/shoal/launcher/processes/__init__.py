"""Child processes of a launcher, their ports, and their credentials."""
