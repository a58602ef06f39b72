"""Checking every chunk of a set (`verification`): a child process finds the datasets (`look`), `check` reads them.

Nothing is imported here: the child process begins with a part of it.
"""
