"""The replica process: one model, one socket, one decoding thread.

Read `server.py` (the socket), `session.py` (who it works for), `executor.py` (engine calls) and
`answer.py` (what a client is told), in that order; the next file is the engine's header.
"""
