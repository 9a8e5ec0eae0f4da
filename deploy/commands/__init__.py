"""The commands by group: each file has `add`, which declares their flags, and a function for each command.

Only what declares flags is imported at the top; a function imports what it needs when it runs.
"""
