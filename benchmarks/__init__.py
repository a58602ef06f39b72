"""Benchmarks: `python -m benchmarks NAME`.

They use hpctrain as its users do and choose settings for a machine by measuring on it; nothing of hpctrain imports
them. How they measure is in `harness`, what the machine was in `environment`, what is printed in `report`.
"""
