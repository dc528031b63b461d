"""The engine of async_sgd: a worker's side of the parameter servers.

`engine` trains; `servers` speaks to all servers and `server_link` to one, whose `ledger` says how far the worker is with it; `tensors` is
what they send; `tables` looks up the rows of sparse tables, and says what is pushed of them; `options` are the user's and the optimizer's;
`job` speaks to the coordinator, and `leases` has its batches; `own_cluster` starts a coordinator and a server where a script runs alone.
"""
