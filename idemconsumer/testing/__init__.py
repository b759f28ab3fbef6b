"""What the project's users test with: contract suites for stores and brokers, and crashes at named points.

Public. Not imported by anything that runs in production.
"""
