"""The command line: one module a group of verbs.

Errors that a person can act on are one line and an exit code, never a traceback.
"""
