"""Clusters that a command starts: coordinators, parameter servers, and the registry that finds
them."""
