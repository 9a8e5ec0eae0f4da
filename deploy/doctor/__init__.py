"""`tinyloop doctor`: what is wrong with a machine and a configuration, and what to do about it.

Each file looks at one thing and yields findings; report.py shows them.
"""
