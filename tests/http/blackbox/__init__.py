"""What a service behind the front door does, seen from outside: HTTP to a server that runs in a process of its own.

Each test runs for every store and every way a route can be run, under ASGI and under WSGI (`places.MODES`).

To run it against a server of your own, in any language, start that server and give its address:

    IDEMCONSUMER_BLACKBOX_URL=http://127.0.0.1:8000 IDEMCONSUMER_BLACKBOX_MODE=joined \\
        python -m pytest tests/http/blackbox

What needs to kill a server or to cut its connections is left out then. `served/behaviour.py` says what the endpoints
do, in fifty lines; `served/policies.py` which routes there are, and under which policy.
"""
