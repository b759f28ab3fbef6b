"""The SQL, one file a subject, and how a statement is had by its name.

Knows the schema's name and nothing of connections, messages or rules.
"""
