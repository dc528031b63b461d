"""Where jobs are kept: Redis. The only module of the coordinator that speaks to it is store.py;
codec.py says how state is written."""
