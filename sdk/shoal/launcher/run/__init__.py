"""A launcher's part in a run, alone or together with launchers on other machines, from the start to
the exit status."""
