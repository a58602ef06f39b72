"""How ranks end, how that is noticed, and what the supervisor does about it.

Rank side: `exits`, `signals`, `watchdog`, `faults`. Supervisor side: `attempts`, `lease`, `policy`,
`processes`, `wait`, `verdict`, `supervisor`. The two meet in files of the run directory.
"""
