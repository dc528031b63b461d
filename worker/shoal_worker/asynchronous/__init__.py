"""The engine of async_sgd: a worker's side of the parameter servers.

`engine` trains; `servers` speaks to all servers and `server_link` to one; `job` and `leases` speak to the coordinator; `own_cluster` stands
in for both where a script runs by itself.
"""
