"""A launcher's part in a run, alone or together with launchers on other machines, from startup to
exit status."""
