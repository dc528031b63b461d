"""Clusters that a command starts: coordinators, parameter servers, and the registry of running
clusters."""
