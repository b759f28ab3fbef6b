"""The App: the handlers of a service, and the calls that run single messages without a worker.

The top layer of the library; only the command line and the test kit depend on it.
"""
