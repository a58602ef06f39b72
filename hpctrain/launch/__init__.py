"""Doors to the supervisor: each starts the ranks of one attempt and hands back a process to wait for."""
