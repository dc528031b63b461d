"""Child processes of a launcher, the ports they listen on, and their credentials."""
