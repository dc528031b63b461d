"""A run on this machine, alone or with other launchers, from its start to its exit status."""
