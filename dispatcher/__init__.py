"""The dispatcher process: one front for clients, one link per replica, and the policy between them.

Read `server.py` (sockets), then `core.py` (decisions); each side topic is one file behind one verb.
"""
