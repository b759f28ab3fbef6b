"""The App: what a service is made of, and running single messages without a worker.

The highest room of the library; the command line and the test kit come above it.
"""
