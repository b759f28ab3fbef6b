"""What a person can inspect and decide: dead letters and sagas.

For the command line and for dashboards. Runs no handler.
"""
